"""A reward model: scores whose differences say which of two answers is preferred (Bradley-Terry;
Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

The loss of a pair is -log sigmoid(c - r - margin), averaged over pairs, where c and r are the
scores of the chosen and the rejected answer. A score is a linear function, without a bias, of the
final hidden state of the last token. A copy of the policy with such a head is trained; the policy
does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs


@algorithm_options()
class Algorithm(Supervised):
    """The ranking loss of pairs, and a term that keeps their scores around 0."""

    name: ClassVar[str] = "reward_model"
    stage: ClassVar[str] = "reward_model"

    center_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the mean of (c + r)^2, which keeps scores around 0 "
        "(arXiv:2312.09244)",
    )
    score_init_std: float = Field(
        0.02, ge=0, description="standard deviation of the score head's first weights"
    )

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts; see
        `PolicyGradient.with_totals`."""
        from rl.algorithms._pairs import with_totals

        return with_totals(inputs)

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean over the pairs of the mini-batch, and metrics.

        Rows are as in `dpo`. `margin` is optional. Raises ValueError if scores or segments are
        absent.
        """
        from rl.algorithms._pairs import ranking_loss

        return ranking_loss(self, inputs)
