"""On-policy distillation by sampled reverse KL: a teacher grades each token that the policy wrote
(Thinking Machines Lab 2025, "On-Policy Distillation"; the advantage of MiniLLM's single step,
arXiv:2306.08543).

    A_t = teacher_coef (log q(y_t) - log p_old(y_t)) + reward_coef A(rewards)

q is the teacher's distribution after the same tokens, at the temperature of sampling, and p_old the
policy's before the updates of the step; both are constants. The expectation of this policy gradient
is the gradient of KL(p || q) at each token. No future token counts (discount 0), and neither a mean
over the group nor a standard deviation is taken. A(rewards) is the advantage of `grpo`; with
`reward_coef: 0`, the default, no rewards are needed.

P prompts, G completions of each, T tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from rl.algorithms._advantages import completion_mask, precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options()
class Algorithm(GroupRelative, Clipped):
    """Token advantages from a teacher, and the clipped loss."""

    name: ClassVar[str] = "opd"

    teacher_coef: float = Field(
        1.0, gt=0, description="weight of log q - log p_old of each token in its advantage"
    )
    reward_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the advantages of rewards, as in `grpo`; 0: rewards are reported "
        "only, and need not be there",
    )

    @model_validator(mode="after")
    def _consistent_rewards(self):
        if self.combine != "sum" and not self.reward_coef:
            raise ValueError("combine does nothing with reward_coef: 0")
        return self

    @property
    def needs_rewards(self) -> bool:
        """Whether completions without a score leave the loss."""
        return self.reward_coef > 0

    @property
    def may_have_reference(self) -> bool:
        """Whether a stage can have a reference model: it may be the teacher."""
        return True

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss, and the log-probabilities that the advantages compare."""
        policy = {"old_logp"} if self.old_logp == "trainer" else set()
        return super().inputs | {"teacher_logp", "teacher_kl"} | policy

    def advantages(
        self,
        rewards: ArrayLike,
        lengths: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        teacher_kl: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> np.ndarray:
        """Returns float[P,G,T], 0 outside the mask.

        rewards, lengths, weights: as in `grpo`. teacher_kl: float[P,G,T], old_logp - teacher_logp.
        mask: [P,G,T], tokens that count; None: the first `lengths`. Raises ValueError without
        `teacher_kl`.
        """
        if teacher_kl is None:
            raise ValueError("opd compares each token with a teacher: give `teacher_kl`")
        mask_PGT = completion_mask(lengths, teacher_kl, mask)
        advantages_PGT = -self.teacher_coef * np.asarray(teacher_kl, np.float64)
        if self.reward_coef:
            of_rewards = super().advantages(rewards, lengths, weights)
            advantages_PGT = advantages_PGT + self.reward_coef * of_rewards[..., None]
        return np.where(mask_PGT, advantages_PGT, 0.0).astype(precision(rewards))
