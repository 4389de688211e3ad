"""Rejection-sampling fine-tuning (RAFT, Dong et al. 2023, arXiv:2304.06767): the best completions
of each prompt are demonstrations.

The `keep` completions with the highest rewards among the G completions of each of P prompts are
kept, if their reward is above `threshold`. The loss is the mean of -logp over the tokens of all
kept completions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from rewards.workers.rounding import without_rounding
from rl.algorithms._advantages import precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._sampled import Sampled

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs


@algorithm_options()
class Algorithm(Sampled):
    """Advantage 1 for kept completions and 0 for others, and the loss of demonstrations (`sft`)."""

    name: ClassVar[str] = "raft"
    loss_type: ClassVar[str] = "nll"
    per_token_applies_correction: ClassVar[bool] = False

    keep: int = Field(
        1,
        ge=1,
        description="largest number of completions of a prompt to train on: those of highest "
        "reward",
    )
    threshold: float | None = Field(
        None, description="train only on completions with a reward above this; null: any"
    )

    def advantages(self, rewards: ArrayLike, lengths: ArrayLike | None = None) -> np.ndarray:
        """Returns float[P,G]: 1 where a completion is kept, else 0. Of equal rewards the first is
        kept.

        rewards: float[P,G], NaN: no score, which is never kept. lengths: without effect.
        """
        rewards = np.asarray(rewards)
        threshold = -np.inf if self.threshold is None else self.threshold
        together = np.concatenate(
            [rewards, np.full_like(rewards[:, :1], threshold, precision(rewards))], axis=1
        )
        *scores, threshold_P = np.moveaxis(without_rounding(together), 1, 0)
        scores_PG = np.where(
            np.isfinite(rewards.astype(np.float64)), np.stack(scores, axis=1), -np.inf
        )
        rank_PG = np.argsort(np.argsort(-scores_PG, axis=1, kind="stable"), axis=1, kind="stable")
        return ((rank_PG < self.keep) & (scores_PG > threshold_P[:, None])).astype(
            precision(rewards)
        )

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with a mask of kept completions and its
        counts."""
        from rl.algorithms import _inputs

        return _inputs.with_totals(self._with_kept_mask(inputs))

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean over the tokens of kept completions of the mini-batch, and metrics.

        Raises ValueError where `logp` or `advantages` are absent.
        """
        from rl.algorithms import _losses

        return _losses.supervised_loss(self.loss_type, self._with_kept_mask(inputs))

    def _with_kept_mask(self, inputs: PolicyInputs) -> PolicyInputs:
        import jax.numpy as jnp

        if inputs.advantages is None:
            raise ValueError("PolicyInputs.advantages missing: they say which completions are kept")
        kept = jnp.asarray(inputs.advantages) > 0
        mask = jnp.asarray(inputs.mask)
        return dataclasses.replace(
            inputs, mask=jnp.where(kept[:, None] if kept.ndim == 1 else kept, mask, 0.0)
        )
