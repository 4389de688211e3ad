"""Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without its two divisions, by the length of a completion and by the standard
deviation of its group: they make long wrong completions cheap, and weigh questions that are too easy or too hard the most."""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(defaults={"scale": "none", "aggregation": "constant"})
class Algorithm(GroupRelative, Clipped):
    """Advantages without a standard deviation, the clipped loss over a constant length."""

    name: ClassVar[str] = "dr_grpo"
