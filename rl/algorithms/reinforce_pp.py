"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages without a critic and without a group.

The return of a token is the reward of its completion minus the KL to the reference from that token
on. It is normalised over all tokens of the batch, so long completions weigh more in mean and
deviation. With `baseline` the mean of the group is subtracted first, and all tokens of a completion
have one advantage.

P prompts, G completions of each, T tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from rl.algorithms._advantages import centred, completion_mask, precision, whiten
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, KLReward


@algorithm_options(defaults={"kl_reward_coef": 0.0})
class Algorithm(KLReward, Clipped):
    """Token advantages, whitened over the batch, and the clipped loss."""

    name: ClassVar[str] = "reinforce_pp"

    baseline: bool = Field(
        False, description="rewards less the mean of their group (REINFORCE++-baseline)"
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description="discount of a reward one token later; with baseline: none"
    )

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss and the KL penalty, and the mask, since each token has an
        advantage."""
        return super().inputs | {"completion_mask"}

    def advantages(
        self,
        rewards: ArrayLike,
        lengths: ArrayLike | None = None,
        token_kl: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> np.ndarray:
        """Returns float[P,G,T], 0 outside the mask, without a score and for equal returns.

        rewards: float[P,G], NaN: no score. lengths: [P,G]. token_kl: float[P,G,T], old_logp -
        ref_logp, used if `kl_reward_coef` is above 0. mask: [P,G,T], tokens that count; None: the
        first `lengths`.
        """
        rewards_PG = np.asarray(rewards, np.float64)
        mask_PGT = completion_mask(lengths, token_kl, mask) & np.isfinite(rewards_PG)[..., None]
        if self.baseline:
            returns_PGT = np.broadcast_to(
                centred(self.subtract_kl(rewards, lengths, token_kl, mask))[..., None],
                mask_PGT.shape,
            )
        else:
            returns_PGT = self._returns(rewards_PG, token_kl, mask_PGT)
        dtype = precision(rewards)
        return whiten(np.where(mask_PGT, returns_PGT, 0.0), mask_PGT).astype(dtype)

    def _returns(
        self, rewards_PG: np.ndarray, token_kl: ArrayLike | None, mask_PGT: np.ndarray
    ) -> np.ndarray:
        """Returns the discounted return of each token; tokens outside the mask are skipped."""
        kl_PGT = (
            np.zeros(mask_PGT.shape)
            if not self.kl_reward_coef
            else np.where(mask_PGT, self.require_token_kl(token_kl), 0.0)
        )
        returns = np.zeros(mask_PGT.shape)
        after = np.where(mask_PGT.any(-1), np.nan_to_num(rewards_PG), 0.0)
        first = np.ones(rewards_PG.shape, bool)  # the last token has the reward itself
        for t in reversed(range(mask_PGT.shape[-1])):
            here = mask_PGT[..., t]
            discounted = (
                np.where(first, after, self.gamma * after) - self.kl_reward_coef * kl_PGT[..., t]
            )
            after = np.where(here, discounted, after)
            first = first & ~here
            returns[..., t] = np.where(here, after, 0.0)
        return returns
