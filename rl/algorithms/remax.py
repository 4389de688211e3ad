"""ReMax (Li et al. 2024, arXiv:2310.10505): the baseline of a completion is the reward of the greedy completion of its prompt."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rl.algorithms._advantages import precision
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped


@algorithm_options()
class Algorithm(Clipped):
    """Advantages r - r(greedy), the clipped loss."""

    name: ClassVar[str] = "remax"

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs of the loss, and the reward of a greedy completion of each prompt."""
        return super().inputs | {"greedy_reward"}

    def advantages(self, rewards, lengths=None, greedy=None) -> np.ndarray:
        """float[P,G] rewards and float[P] of the greedy completions, NaN: no score -> float[P,G]; `lengths` plays no part. Where
        either has no score it is 0."""
        if greedy is None:
            raise ValueError("remax compares with greedy completions: give their rewards as `greedy`")
        rewards = np.asarray(rewards)
        dtype = precision(rewards)
        difference = rewards.astype(np.float64) - np.asarray(greedy, np.float64)[:, None]
        return np.where(np.isfinite(difference), difference, 0.0).astype(dtype)
