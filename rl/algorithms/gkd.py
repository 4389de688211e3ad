"""Generalised knowledge distillation (GKD, Agarwal et al. 2023, arXiv:2306.13649) on the policy's
own samples: at each token that the policy wrote, its next-token distribution learns from that of a
frozen teacher.

    L = mean over tokens of d(p, q)

p is softmax(z / tau) of the policy and q that of the teacher, after the same tokens; d is a
divergence over the full vocabulary, or over the teacher's likeliest tokens. The samples are
constants: no gradient goes through what was drawn. All samples are the policy's own, which is
lambda = 1 of the paper; `distill` is lambda = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._sampled import Sampled

if TYPE_CHECKING:
    import jax

    from policy.heads.divergence import Divergence
    from rl.algorithms._inputs import PolicyInputs


@algorithm_options()
class Algorithm(Sampled):
    """A divergence from the teacher at the tokens of samples. Rewards are reported, not learned."""

    name: ClassVar[str] = "gkd"
    inputs: ClassVar[frozenset[str]] = frozenset({"teacher"})
    needs_rewards: ClassVar[bool] = False
    has_features: ClassVar[bool] = False
    features_loss: ClassVar[Literal["cosine", "squared"]] = "cosine"
    features_layers: ClassVar[None] = None

    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "jsd",
        description="forward: KL(teacher || policy), covers what the teacher does; reverse: "
        "KL(policy || teacher), avoids what the teacher does not do; jsd: the generalised "
        "Jensen-Shannon divergence",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="jsd: weight of the teacher in the mixture")
    temperature: float | None = Field(
        None,
        gt=0,
        description="both logits are divided by it before they are compared; null: "
        "sampling.temperature",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="compares only so many of the teacher's likeliest tokens; null: all",
    )
    tail: Literal["none", "renormalise", "tail"] = Field(
        "tail",
        description="top_k: tail adds one symbol for all other tokens; renormalise compares "
        "softmaxes over the k tokens; none sums over the k tokens as they are, which is no "
        "divergence",
    )
    aggregation: Literal["token", "sequence"] = Field(
        "token", description="mean over tokens; or over sequences of their token mean"
    )

    @property
    def divergence_spec(self) -> Divergence:
        """Returns the divergence that the teacher's pass computes."""
        from policy.heads.divergence import Divergence

        return Divergence(self.divergence, self.beta, self.top_k, self.tail)

    def temperature_of(self, inputs: PolicyInputs) -> float | None:
        """Returns the temperature of the comparison; None: that of the log-probabilities."""
        return self.temperature

    def advantages(self, rewards: ArrayLike, lengths: ArrayLike | None = None) -> np.ndarray:
        """Returns zeros float[P,G]: no completion is better than another. rewards: [P,G]."""
        return np.zeros(np.shape(rewards))

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts."""
        from rl.algorithms._inputs import with_totals

        return with_totals(inputs)

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the micro-batch's share of the mean divergence of the mini-batch, and metrics.

        Raises ValueError without `logp` and `divergence`.
        """
        from rl.algorithms._distillation import sampled_divergence_loss

        return sampled_divergence_loss(self, inputs)
