"""A reward model: scores whose differences say which of two answers is preferred (Bradley-Terry; Ouyang et al. 2022,
arXiv:2203.02155, eq. 1).

Of each pair, with c and r the scores of the chosen and the rejected answer, -log sigmoid(c - r - margin), averaged over pairs. A
score is a linear function, without a bias, of the final hidden state of the last token. What learns is a copy of the policy with
such a head; the policy stays as it is.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised


@algorithm_options()
class Algorithm(Supervised):
    """The ranking loss of pairs, and a term that keeps their scores around 0."""

    name: ClassVar[str] = "reward_model"
    stage: ClassVar[str] = "reward_model"

    center_coef: float = Field(
        0.0, ge=0, description="weight of the mean of (c + r)^2, which keeps scores around 0 (arXiv:2312.09244)"
    )
    score_init_std: float = Field(0.02, ge=0, description="standard deviation of the score head's first weights")

    def with_totals(self, inputs):
        """`inputs` of a whole optimiser batch with its counts filled in; see `PolicyGradient.with_totals`."""
        from rl.algorithms._pairs import with_totals

        return with_totals(inputs)

    def loss(self, inputs):
        """Mean over the pairs of the whole optimiser batch, and metrics; of `inputs` scores and segments are needed, and margin
        where there is one. Rows are as in `dpo`. Raises ValueError where one of them is absent."""
        from rl.algorithms._pairs import ranking_loss

        return ranking_loss(self, inputs)
