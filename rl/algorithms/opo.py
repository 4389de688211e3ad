"""On-policy optimal baseline (Hao et al. 2025, arXiv:2505.23585): the baseline is the
length-weighted mean of the rewards.

This baseline minimises the variance of the gradient if the gradients of all tokens have equal
norms.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from rl.algorithms._advantages import centred
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped


@algorithm_options()
class Algorithm(Clipped):
    """Advantages r - sum(length * r) / sum(length), the clipped loss."""

    name: ClassVar[str] = "opo"

    def advantages(self, rewards: ArrayLike, lengths: ArrayLike | None = None) -> np.ndarray:
        """Returns float[P,G]. Equal rewards give exactly 0. Raises ValueError without `lengths`.

        rewards: float[P,G], NaN: no score. lengths: int[P,G], tokens.
        """
        if lengths is None:
            raise ValueError(
                "opo weighs rewards by the lengths of their completions: give `lengths`"
            )
        return centred(rewards, weights=lengths)
