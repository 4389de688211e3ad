"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and losses of its kind.

The loss of a pair is a function of w and l, averaged over pairs:

    w = sum(logp - ref_logp) over the tokens of the chosen answer
    l = sum(logp - ref_logp) over the tokens of the rejected answer
    z = beta (w - l)

No answers are sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs

SMOOTHED = ("sigmoid", "robust", "exo_pair")
PairLoss = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "discopop",
]


@algorithm_options()
class Algorithm(Supervised):
    """The loss of preferred pairs against a reference model, and a term that keeps the chosen
    answers probable."""

    name: ClassVar[str] = "dpo"
    stage: ClassVar[str] = "preference"
    inputs: ClassVar[frozenset[str]] = frozenset({"ref_logp"})

    loss_type: PairLoss = Field(
        "sigmoid", description="function of the two log-ratios of a pair, see algorithms.md"
    )
    beta: float = Field(
        0.1, gt=0, description="how much a move away from the reference model costs; ipo: its tau"
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of pairs taken to be labelled the wrong way round: sigmoid, robust, "
        "exo_pair",
    )
    nll_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the mean negative log-probability of the chosen answers' tokens",
    )
    discopop_tau: float = Field(0.05, gt=0, description="temperature of the mixture in discopop")

    @model_validator(mode="after")
    def _consistent(self):
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing does nothing with loss_type {self.loss_type}; it is for "
                f"{', '.join(SMOOTHED)}"
            )
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError(
                "loss_type exo_pair takes the logarithm of label_smoothing: set it above 0, e.g. "
                "to 1e-3"
            )
        return self

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts; see
        `PolicyGradient.with_totals`."""
        from rl.algorithms._pairs import with_totals

        return with_totals(inputs)

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean over the pairs of the mini-batch, and metrics.

        In each row the odd segments are chosen answers, and the rejected answer of the pair
        follows. Raises ValueError if logp, ref_logp or segments are absent.
        """
        from rl.algorithms._pairs import preference_loss

        return preference_loss(self, inputs)
