"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306): single good and bad
answers.

The loss of an answer is

    loss = desirable_weight   (1 - sigmoid(beta (r - z)))   for a good answer
           undesirable_weight (1 - sigmoid(beta (z - r)))   for a bad one

averaged over answers. r is the sum of logp - ref_logp over the tokens of an answer. z is the batch
mean of the same sum for answers to other prompts, at least 0 and without a gradient: an estimate of
the KL between policy and reference, taken before the updates of the step.

N rows, T tokens, S sequence numbers in a row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._supervised import Supervised

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs


@algorithm_options()
class Algorithm(Supervised):
    """The loss of labelled answers against a reference model."""

    name: ClassVar[str] = "kto"
    stage: ClassVar[str] = "unpaired"

    loss_type: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="kto; apo_zero_unpaired: z is 0, which costs no further passes "
        "(arXiv:2408.06266)",
    )
    beta: float = Field(
        0.1, gt=0, description="how much a move away from the reference model costs"
    )
    desirable_weight: float = Field(1.0, ge=0, description="weight of the loss of good answers")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of the loss of bad answers")

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs: reference log-probabilities, and old ones for the estimate of the
        KL."""
        return frozenset({"ref_logp"} | ({"old_logp"} if self.loss_type == "kto" else set()))

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts, and z as `extra["z"]`."""
        import jax.numpy as jnp

        from rl.algorithms import _inputs

        inputs = _inputs.with_totals(inputs)
        extra = inputs.extra or {}
        if "z" in extra or "kl" not in extra:
            return inputs
        assert inputs.num_sequences is not None  # counted by `with_totals`
        sequences = _inputs.Sequences(inputs)
        kl = jnp.where(
            sequences.exists_NS, sequences.mean(jnp.asarray(extra["kl"], jnp.float32)), 0.0
        ).sum()
        z = jnp.maximum(kl / jnp.maximum(inputs.num_sequences, 1.0), 0.0)
        return dataclasses.replace(inputs, extra=extra | {"z": z})

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean over the answers of the mini-batch, and metrics.

        `extra["label"]` is 1 on the tokens of good answers and 0 on others; `extra["kl"]` is the
        log-ratio of an answer to another prompt at each token of the row. Raises ValueError where
        an input is absent.
        """
        import jax
        import jax.numpy as jnp

        from rl.algorithms import _inputs

        absent = [name for name in ("logp", "ref_logp", "extra") if getattr(inputs, name) is None]
        if absent:
            raise ValueError(
                f"PolicyInputs.{', '.join(absent)} missing: kto compares labelled answers with a "
                "reference model"
            )
        inputs = self.with_totals(inputs)
        assert inputs.logp is not None and inputs.ref_logp is not None and inputs.extra is not None
        num_sequences = inputs.num_sequences
        assert num_sequences is not None and inputs.num_tokens is not None  # of `with_totals`
        needed = {"label", "z"} if self.loss_type == "kto" else {"label"}
        if missing := needed - inputs.extra.keys():
            raise ValueError(f"PolicyInputs.extra holds no {', '.join(sorted(missing))}")
        sequences = _inputs.Sequences(inputs)
        z = (
            jnp.float32(0.0)
            if self.loss_type != "kto"
            else jax.lax.stop_gradient(inputs.extra["z"])
        )
        logp = jnp.where(sequences.mask_NT, inputs.logp, 0.0)
        ratio = sequences.sum(
            logp - jax.lax.stop_gradient(jnp.where(sequences.mask_NT, inputs.ref_logp, 0.0))
        )
        good = sequences.exists_NS & (
            sequences.mean(jnp.asarray(inputs.extra["label"], jnp.float32)) > 0.5
        )
        bad = sequences.exists_NS & ~good

        def mean(values: jax.Array, where: jax.Array) -> jax.Array:
            return jnp.where(where, values, 0.0).sum() / jnp.maximum(num_sequences, 1.0)

        loss = self.desirable_weight * mean(1 - jax.nn.sigmoid(self.beta * (ratio - z)), good)
        loss += self.undesirable_weight * mean(1 - jax.nn.sigmoid(self.beta * (z - ratio)), bad)
        # Shares of the batch, so that the metrics of micro-batches add up.
        metrics = {
            "kto/desirable_share": mean(jnp.ones_like(ratio), good),
            "kto/reward_desirable": mean(self.beta * ratio, good),
            "kto/reward_undesirable": mean(self.beta * ratio, bad),
            "kto/correct_side": mean(
                jnp.where(good, ratio > z, ratio < z).astype(jnp.float32), sequences.exists_NS
            ),
            "kto/kl": mean(jnp.broadcast_to(z, ratio.shape), sequences.exists_NS),
        }
        if inputs.entropy is not None:
            metrics["entropy"] = sequences.sum(inputs.entropy).sum() / jnp.maximum(
                inputs.num_tokens, 1.0
            )
        return loss, jax.tree.map(jax.lax.stop_gradient, metrics)
