"""On-policy optimal baseline (Hao et al. 2025, arXiv:2505.23585): the baseline of a group is the mean of its rewards, each
weighted by the length of its completion, which is what makes the variance of the gradient least if all tokens have gradients
of one size."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rl.algorithms._advantages import centred
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped


@algorithm_options()
class Algorithm(Clipped):
    """Advantages r - sum(length * r) / sum(length), the clipped loss."""

    name: ClassVar[str] = "opo"

    def advantages(self, rewards, lengths=None) -> np.ndarray:
        """float[P,G] rewards, NaN: no score; `lengths` int[P,G] in tokens -> float[P,G]. Equal rewards give exactly 0."""
        if lengths is None:
            raise ValueError("opo weighs rewards by the lengths of their completions: give `lengths`")
        return centred(rewards, weights=lengths)
