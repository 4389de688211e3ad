"""Group relative policy optimisation: the baseline of a completion is the mean reward of its group.

The defaults of the loss are those of TRL 1.16: token aggregation and no KL term, as in DAPO
(arXiv:2503.14476). One differs: with vLLM, TRL masks sequences by the difference of sampler and
trainer, here `correction: sequence_mask`. DeepSeekMath (arXiv:2402.03300) has `aggregation:
sequence` and `kl_coef: 0.04`. `dr_grpo` and `gspo` are this algorithm with other defaults.
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
