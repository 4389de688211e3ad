"""Decoupled clip and dynamic sampling policy optimisation (DAPO, Yu et al. 2025, arXiv:2503.14476).

DAPO is GRPO with a wider clipping range above than below, with equal token weights, and with
sampling until the rewards of every group differ. The paper adds the reward function
`soft_overlong`; `dynamic_reward` excludes it from the choice of groups.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(defaults={"epsilon_high": 0.28, "dynamic_batches": 10})
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group, the clipped loss over tokens, and only groups whose rewards
    differ."""

    name: ClassVar[str] = "dapo"
