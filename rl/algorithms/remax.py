"""ReMax (Li et al. 2024, arXiv:2310.10505): the baseline is the reward of the greedy completion of
the prompt.

P prompts, G completions of each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from rewards.workers.rounding import without_rounding
from rl.algorithms._advantages import precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped


@algorithm_options()
class Algorithm(Clipped):
    """Advantages r - r(greedy), and the clipped loss."""

    name: ClassVar[str] = "remax"

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss, and the reward of a greedy completion of each prompt."""
        return super().inputs | {"greedy_reward"}

    def advantages(
        self, rewards: ArrayLike, lengths: ArrayLike | None = None, greedy: ArrayLike | None = None
    ) -> np.ndarray:
        """Returns float[P,G]: reward minus greedy reward, 0 if one of them has no score; `lengths`
        has no effect.

        rewards: float[P,G], NaN: no score. greedy: float[P], rewards of the greedy completions.
        Raises ValueError without `greedy`.
        """
        if greedy is None:
            raise ValueError(
                "remax compares with greedy completions: give their rewards as `greedy`"
            )
        rewards = np.asarray(rewards)
        dtype = precision(rewards)
        together_PG = without_rounding(np.column_stack([rewards, np.asarray(greedy, dtype)]))
        difference = together_PG[:, :-1] - together_PG[:, -1:]
        return np.where(np.isfinite(difference), difference, 0.0).astype(dtype)
