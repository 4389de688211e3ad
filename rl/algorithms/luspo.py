"""Length-unbiased sequence policy optimisation (arXiv:2602.05261): the GSPO loss of a sequence
times its length.

A token of a long completion therefore has the same effect as a token of a short completion.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(
    defaults={
        "ratio": "sequence",
        "aggregation": "sequence_sum",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    }
)
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group, and the clipped loss of sequences times their lengths."""

    name: ClassVar[str] = "luspo"
