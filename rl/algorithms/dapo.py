"""Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv:2503.14476): GRPO that clips less above than
below, weighs all tokens alike and samples until every group has something to learn from. The paper adds the reward function
`soft_overlong`, which `dynamic_reward` then leaves out of the choice of groups."""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options(defaults={"epsilon_high": 0.28, "dynamic_batches": 10})
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group, the clipped loss over tokens, groups that differ only."""

    name: ClassVar[str] = "dapo"
