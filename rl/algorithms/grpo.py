"""Group relative policy optimisation: the baseline of a completion is the mean reward of its group.

DeepSeekMath (Shao et al. 2024, arXiv:2402.03300) is `aggregation: sequence, kl_coef: 0.04`; the defaults are from
TRL: token aggregation and no KL term, as in DAPO (arXiv:2503.14476). Dr.GRPO (arXiv:2503.20783) is `scale: none,
aggregation: constant`; GSPO (arXiv:2507.18071) is `ratio: sequence, aggregation: sequence, epsilon: 3e-4, epsilon_high:
4e-4`.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options()
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group, and the clipped loss."""

    name: ClassVar[str] = "grpo"
