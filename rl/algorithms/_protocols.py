"""What trainers ask of algorithms.

`Sampled`, `Supervised` and `PolicyGradient` have defaults for most of it. A stage asks more: the
head of rl/algorithms/__init__.py lists all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import jax
    import numpy as np

    from policy.heads.divergence import Divergence
    from rl.algorithms._inputs import PolicyInputs


class TrainedLoss(Protocol):
    """An algorithm as every trainer sees it: a loss on micro-batches of a mini-batch."""

    name: ClassVar[str]
    """Its name in a configuration."""

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the inputs of a mini-batch with the counts that its loss divides by. Losses,
        gradients and metrics of micro-batches cut from the result add up to those of the
        mini-batch."""
        ...

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (float32 scalar, metrics) of a micro-batch, in a jitted function.

        The scalar is differentiable in the outputs of the model: `logp` and `entropy`, `divergence`
        and `features`, or `scores`. `rl.algorithms.reduce_metrics` reduces the metrics, which have
        no gradient. Raises ValueError for an input that is absent.
        """
        ...


class TokenFlags(TrainedLoss, Protocol):
    """An algorithm whose updates report what they computed of each token."""

    def token_flags(self, inputs: PolicyInputs) -> jax.Array | None:
        """Returns uint8[R, T], the bits of rl/algorithms/_token_flags.py; None: the loss reports
        none."""
        ...


class CriticLoss(TrainedLoss, Protocol):
    """An algorithm with a critic: its inputs have `values`."""

    @property
    def critic_trunk(self) -> Literal["own", "policy"]:
        """The input of the value head: the states of a second decoder, or of the policy."""
        ...

    @property
    def value_init_std(self) -> float:
        """Standard deviation of the first weights of the value head."""
        ...

    def value_loss(
        self, values: jax.Array, old_values: jax.Array, returns: jax.Array, inputs: PolicyInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (float32 scalar, metrics) of a micro-batch, in a jitted function: the loss of the
        critic, differentiable in `values`. Arrays [R, T]."""
        ...


class TeacherLoss(TrainedLoss, Protocol):
    """An algorithm that compares the policy with a teacher: its inputs have `teacher`."""

    @property
    def divergence_spec(self) -> Divergence:
        """The divergence of the distributions of the next token."""
        ...

    @property
    def has_features(self) -> bool:
        """Whether the loss compares the outputs of attention and recurrent layers."""
        ...

    @property
    def features_loss(self) -> Literal["cosine", "squared"]:
        """The distance of an output of the policy's mixer and one of the teacher's: 1 - cosine, or
        the mean square of the difference."""
        ...

    @property
    def features_layers(self) -> Sequence[Sequence[int]] | None:
        """Pairs (layer of the policy, layer of the teacher); None: all, of models of equal
        depth."""
        ...

    def temperature_of(self, inputs: PolicyInputs) -> jax.Array | float | None:
        """Returns the temperature that both logits are divided by; None: the temperature of the
        policy's log-probabilities."""
        ...


class ScoreLoss(TrainedLoss, Protocol):
    """An algorithm that trains a reward model."""

    @property
    def score_init_std(self) -> float:
        """Standard deviation of the first weights of the score head."""
        ...


class DistillCoefs(NamedTuple):
    """The numbers of `distill` that follow the steps of a stage, of one mini-batch."""

    alpha: float | jax.Array
    temperature: float | jax.Array
    features_coef: float | jax.Array


ArrayT_co = TypeVar("ArrayT_co", covariant=True)


class OldLogps(Protocol[ArrayT_co]):
    """The log-probabilities that `select_old_logp` chooses from: of a Batch or a PolicyInputs."""

    @property
    def old_logp(self) -> ArrayT_co:
        """Of the trainer, before the updates of the step."""
        ...

    @property
    def sampler_logp(self) -> ArrayT_co:
        """Of the generator."""
        ...


class SampledArrays(Protocol):
    """The arrays of a Batch on the host that `estimate` reads. N completions of T tokens."""

    @property
    def mask(self) -> np.ndarray:
        """[N,T]: 1 on the tokens that are trained on."""
        ...

    @property
    def old_logp(self) -> np.ndarray | None:
        """[N,T], of the trainer before the updates of the step."""
        ...

    @property
    def ref_logp(self) -> np.ndarray | None:
        """[N,T], of the reference model."""
        ...

    @property
    def old_values(self) -> np.ndarray | None:
        """[N,T], of the critic before the updates of the step."""
        ...

    @property
    def last_values(self) -> np.ndarray | None:
        """[N]: the value of the state after a truncated completion, else 0."""
        ...
