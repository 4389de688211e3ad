"""Losses that the layers bring along, beside the one of the algorithm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.intermediates import Aux
from policy.layers.moe import bias_update
from rl.config import StageOptions

_BIAS = ".feed_forward.router.correction_bias"


def auxiliary_loss(stage: StageOptions, aux: Aux, sequences: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This micro-batch's share of the losses of the parts, each with its coefficient, and their metrics. `sequences`: rows of the
    whole optimiser batch that are not padding."""
    loss, metrics = jnp.float32(0.0), {}
    if routing := aux.found("routing"):
        balance = sum(each.balance.sum() for each in routing.values()) / jnp.maximum(sequences, 1)
        loss += stage.router.balance_coef * balance
        metrics["moe/balance"] = balance
    return loss, metrics


def expert_counts(aux: Aux) -> dict[str, jax.Array]:
    """Choices of each expert, float32[R, X], by path of the layer. They add up over micro-batches."""
    return {path: routing.counts for path, routing in aux.found("routing").items()}


def moved_biases(still: dict[str, jax.Array], counts: dict[str, jax.Array], rate: float) -> dict[str, jax.Array]:
    """The weights without a gradient after an update: selection biases of routers move by the counts of the whole batch."""
    return {
        path: bias_update(array, counts[path.removesuffix(_BIAS)], rate) if path.endswith(_BIAS) else array
        for path, array in still.items()
    }


def load_metrics(counts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """moe/max_load: choices of the busiest expert over the mean, the worst of all layers."""
    loads = [each.max(axis=-1) / jnp.maximum(each.mean(axis=-1), 1.0) for each in counts.values()]
    return {"moe/max_load": jnp.max(jnp.concatenate(loads))} if loads else {}
