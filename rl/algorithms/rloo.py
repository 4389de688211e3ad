"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

The baseline of a completion is the mean reward of the other completions of its group. A completion
is one action, whose ratio is the product of its token ratios. With `kl_reward_coef` (0.05 in TRL)
the KL to the reference, summed over the completion, is subtracted from its reward.

P prompts, G completions of each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from rl.algorithms._advantages import centred, moments, precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, KLReward


@algorithm_options(
    defaults={"ratio": "sequence_sum", "aggregation": "sequence", "kl_reward_coef": 0.0}
)
class Algorithm(KLReward, Clipped):
    """Advantages r - mean of the other completions, and the clipped loss of sequences."""

    name: ClassVar[str] = "rloo"

    normalize_advantages: bool = Field(False, description="their z-score over the batch")

    def advantages(
        self,
        rewards: ArrayLike,
        lengths: ArrayLike | None = None,
        token_kl: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> np.ndarray:
        """Returns float[P,G], 0 without a score, for equal rewards and for a single completion.

        rewards: float[P,G], NaN: no score. lengths: [P,G]. token_kl: float[P,G,T], old_logp -
        ref_logp, used if `kl_reward_coef` is above 0. mask: [P,G,T], tokens that count; None: the
        first `lengths`.
        """
        rewards_PG = self.subtract_kl(rewards, lengths, token_kl, mask)
        scored_PG = np.isfinite(rewards_PG)
        others_P1 = np.maximum(scored_PG.sum(axis=1, keepdims=True) - 1, 1)
        advantages_PG = centred(rewards_PG) * (others_P1 + 1) / others_P1
        if self.normalize_advantages:
            paired_PG = scored_PG & (scored_PG.sum(axis=1, keepdims=True) > 1)
            # The mean is 0 in every group and in the batch. Its rounding error is not subtracted,
            # so groups of equal rewards keep exactly 0.
            std = moments(advantages_PG.reshape(1, -1), paired_PG.reshape(1, -1))[1]
            advantages_PG = np.where(paired_PG, advantages_PG / (std + 1e-4), 0.0)
        return advantages_PG.astype(precision(rewards))
