"""Off-policy distillation: on the tokens of demonstrations, the policy learns the next-token
distributions of a frozen teacher (Hinton et al. 2015, arXiv:1503.02531), the demonstrations
themselves, and the outputs of the teacher's attention and recurrent layers.

    L = alpha d + (1 - alpha) nll + features_coef f

d is the divergence of softmax(z / tau) of the policy from softmax(z / tau) of the teacher, in nats
per token; nll is the loss of `sft`, at temperature 1; f is the distance of the outputs of
attention and recurrent layers. All are means over the tokens of the mini-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from rl.algorithms._options import algorithm_options
from rl.algorithms._protocols import DistillCoefs
from rl.algorithms._supervised import Supervised

if TYPE_CHECKING:
    import jax

    from policy.heads.divergence import Divergence
    from rl.algorithms._inputs import PolicyInputs

ALPHA = "distill/alpha"
TEMPERATURE = "distill/temperature"
FEATURES = "distill/features_coef"
"""Names of the scheduled numbers in `PolicyInputs.adaptive_coefs` and in the metrics of a step."""


@algorithm_options()
class Algorithm(Supervised):
    """Soft targets of a teacher and hard targets of the data; alpha, temperature and features_coef
    may move from step to step."""

    name: ClassVar[str] = "distill"
    inputs: ClassVar[frozenset[str]] = frozenset({"teacher"})

    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward",
        description="forward: KL(teacher || policy), covers what the teacher does; reverse: "
        "KL(policy || teacher), avoids what the teacher does not do; jsd: the Jensen-Shannon "
        "divergence of GKD (arXiv:2306.13649)",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="jsd: weight of the teacher in the mixture")
    alpha: float = Field(
        0.5, ge=0, le=1, description="weight of the soft targets; 1 - alpha: of the hard targets"
    )
    alpha_end: float | None = Field(
        None, ge=0, le=1, description="alpha at the end of the stage; null: constant"
    )
    temperature: float = Field(
        1.0, gt=0, description="both logits are divided by it before they are compared"
    )
    temperature_end: float | None = Field(
        None, gt=0, description="temperature at the end of the stage; null: constant"
    )
    temperature_squared: bool = Field(
        False,
        description="the divergence times the square of the temperature, as Hinton et al. and "
        "MaxText have it",
    )
    schedule: Literal["linear", "cosine"] = Field(
        "linear",
        description="how alpha, temperature and features_coef go to their values at the end of "
        "the stage",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="compares only so many of the teacher's likeliest tokens; null: all. Files of "
        "`rl teach` hold so many as they were written with",
    )
    tail: Literal["none", "renormalise", "tail"] = Field(
        "renormalise",
        description="top_k and files: renormalise compares softmaxes over the k tokens; tail adds "
        "one symbol for all "
        "other tokens; none sums over the k tokens as they are, which is no divergence",
    )
    features_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the distance between the outputs of both models' attention and "
        "recurrent layers; 0: not computed. Learned matrices project those of a policy of another "
        "width than the teacher",
    )
    features_coef_end: float | None = Field(
        None, ge=0, description="features_coef at the end of the stage; null: constant"
    )
    features_loss: Literal["cosine", "squared"] = Field(
        "cosine",
        description="cosine: 1 - cos; squared: mean squared difference of the numbers of a token",
    )
    features_layers: list[list[int]] | None = Field(
        None,
        description="pairs (layer of the policy, layer of the teacher), from 0; null: all, of "
        "models of equal depth",
    )
    train_on: Literal["assistant", "last_turn", "all"] = Field(
        "assistant", description="which tokens, as in `sft`"
    )

    @model_validator(mode="after")
    def _possible(self):
        if any(len(pair) != 2 or min(pair) < 0 for pair in self.features_layers or ()):
            raise ValueError(
                "`features_layers` must be a list of pairs [layer of the policy, layer of the "
                "teacher]"
            )
        return self

    @property
    def divergence_spec(self) -> Divergence:
        """Returns the divergence that the teacher's pass computes."""
        from policy.heads.divergence import Divergence

        return Divergence(self.divergence, self.beta, self.top_k, self.tail)

    @property
    def has_features(self) -> bool:
        """Whether the loss compares the outputs of attention and recurrent layers."""
        return max(self.features_coef, self.features_coef_end or 0.0) > 0

    @property
    def adaptive_coefs(self) -> dict[str, float]:
        """Returns alpha, temperature and features_coef of the first step."""
        return self.scheduled_coefs(0.0)

    def scheduled_coefs(self, done: float) -> dict[str, float]:
        """Returns alpha, temperature and features_coef when the share `done` of the stage's steps
        is done."""
        from rl.algorithms._schedules import scheduled

        ends = {
            ALPHA: (self.alpha, self.alpha_end),
            TEMPERATURE: (self.temperature, self.temperature_end),
        }
        if self.has_features:
            ends[FEATURES] = self.features_coef, self.features_coef_end
        return {
            name: scheduled(self.schedule, start, end, done) for name, (start, end) in ends.items()
        }

    def coefs_of(self, inputs: PolicyInputs) -> DistillCoefs:
        """Returns the scheduled numbers of a mini-batch."""
        coefs = inputs.adaptive_coefs or self.adaptive_coefs
        return DistillCoefs(coefs[ALPHA], coefs[TEMPERATURE], coefs.get(FEATURES, 0.0))

    def temperature_of(self, inputs: PolicyInputs) -> jax.Array | float:
        """Returns the temperature of a mini-batch, `PolicyInputs`."""
        return self.coefs_of(inputs).temperature

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the micro-batch's share of the mean over the tokens of the mini-batch, and
        metrics.

        Raises ValueError without `logp` and `divergence`.
        """
        from rl.algorithms._distillation import distillation_loss

        return distillation_loss(self, inputs)
