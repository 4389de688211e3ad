"""What the algorithms share that learn from a dataset alone: they sample nothing."""

from __future__ import annotations

from typing import ClassVar


class Supervised:
    needs_rollouts: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False
    needs_pairs: ClassVar[bool] = False  # rows of two answers to a prompt, of which one was preferred
    needs_scores: ClassVar[bool] = False  # what learns is a score head on a copy of the policy, which itself stays

    def needs_old_logp(self, updates_per_step: int) -> bool:
        return False
