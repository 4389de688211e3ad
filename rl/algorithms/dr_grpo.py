"""Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without two divisions.

Division by the length of a completion makes long wrong completions cheap. Division by the standard
deviation of the group gives the most weight to questions that are too easy or too hard.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(defaults={"scale": "none", "aggregation": "constant"})
class Algorithm(GroupRelative, Clipped):
    """Advantages without a standard deviation, the clipped loss over a constant length."""

    name: ClassVar[str] = "dr_grpo"
