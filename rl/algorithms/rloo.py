"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740): the baseline of a completion is the mean reward of the
others of its group; a completion is one action, whose ratio is the product of its tokens' ratios. With `kl_reward_coef` (0.05
in TRL) the KL to the reference, summed over the completion, is taken off its reward."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from rl.algorithms._advantages import centred, moments, precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, KLReward


@algorithm_options(defaults={"ratio": "sequence_sum", "aggregation": "sequence", "kl_reward_coef": 0.0})
class Algorithm(KLReward, Clipped):
    """Advantages r - mean of the others, the clipped loss of sequences."""

    name: ClassVar[str] = "rloo"

    normalize_advantages: bool = Field(False, description="their z-score over the batch")

    def advantages(self, rewards, lengths=None, token_kl=None, mask=None) -> np.ndarray:
        """float[P,G] rewards, NaN: no score -> float[P,G], 0 without a score, for equal rewards and for a completion alone.
        `token_kl` float[P,G,T], old_logp - ref_logp: where `kl_reward_coef` is above 0; `mask` [P,G,T] says which tokens count,
        None: the first `lengths` [P,G]."""
        rewards_PG = self.with_kl(rewards, lengths, token_kl, mask)
        scored_PG = np.isfinite(rewards_PG)
        others_P1 = np.maximum(scored_PG.sum(axis=1, keepdims=True) - 1, 1)
        advantages_PG = centred(rewards_PG) * (others_P1 + 1) / others_P1
        if self.normalize_advantages:
            paired_PG = scored_PG & (scored_PG.sum(axis=1, keepdims=True) > 1)
            # Their mean is 0 in every group, and so in the batch: what rounding makes of it is not taken off, so that groups of
            # equal rewards keep exactly 0.
            std = moments(advantages_PG.reshape(1, -1), paired_PG.reshape(1, -1))[1]
            advantages_PG = np.where(paired_PG, advantages_PG / (std + 1e-4), 0.0)
        return advantages_PG.astype(precision(rewards))
