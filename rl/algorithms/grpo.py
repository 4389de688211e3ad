"""Group relative policy optimisation: the baseline of a completion is the mean reward of its group.

The defaults are those of TRL: token aggregation and no KL term, as in DAPO (arXiv:2503.14476).
These options give other algorithms:

    DeepSeekMath (arXiv:2402.03300)  aggregation: sequence, kl_coef: 0.04
    Dr.GRPO (arXiv:2503.20783)       scale: none, aggregation: constant
    GSPO (arXiv:2507.18071)          ratio: sequence, aggregation: sequence, epsilon: 3e-4,
    epsilon_high: 4e-4
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, GroupRelative


@algorithm_options()
class Algorithm(GroupRelative, Clipped):
    """Advantages relative to the group (`GroupRelative.advantages`), and the clipped loss
    (`Clipped.per_token`)."""

    name: ClassVar[str] = "grpo"
