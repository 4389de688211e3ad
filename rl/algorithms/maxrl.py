"""Maximum-likelihood reinforcement learning (arXiv:2602.02710): centred rewards over the mean
reward of the group.

Rarely solved questions weigh the most: the gradient approaches the gradient of the log success
rate. Rewards are at least 0.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from rl.algorithms._advantages import centred, scored_mean
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped


@algorithm_options()
class Algorithm(Clipped):
    """Advantages (r - mean) / (mean + eps), the clipped loss."""

    name: ClassVar[str] = "maxrl"

    eps: float = Field(1e-6, gt=0, description="added to the mean")

    def advantages(self, rewards: ArrayLike, lengths: ArrayLike | None = None) -> np.ndarray:
        """Returns float[P,G] from float[P,G] rewards, NaN: no score. Equal rewards give 0;
        `lengths` has no effect."""
        advantages = centred(rewards)
        return (advantages / (scored_mean(rewards) + self.eps)).astype(advantages.dtype)
