"""Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

The loss clips the sequence ratio to the power of one over the length. `ratio: sequence_token` is
the token form of the paper: the same ratio, but each token has the gradient of its own probability
and advantage.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(
    defaults={"ratio": "sequence", "aggregation": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
)
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group, the clipped loss of sequences."""

    name: ClassVar[str] = "gspo"
