"""Losses that the layers bring along, beside the one of the algorithm. R repeats of a stack, X experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from policy.intermediates import Aux, Routing
from policy.layers.moe import bias_update
from rl.config import StageOptions

_BIAS = ".feed_forward.router.correction_bias"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Whole:
    """What a micro-batch has to know of the whole optimiser batch: its rows and tokens that are not padding, and choices of each
    expert float32[R, X] by path of the layer (None: this micro-batch is the whole)."""

    sequences: jax.Array
    tokens: jax.Array
    counts: dict[str, jax.Array] | None = None


def auxiliary_loss(stage: StageOptions, aux: Aux, whole: Whole) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This micro-batch's share of the losses of the parts, each with its coefficient, and their metrics."""
    loss, metrics = jnp.float32(0.0), {}
    if routing := aux.found("routing"):
        if stage.router.balance == "sequence":
            balance = sum(each.balance.sum() for each in routing.values()) / jnp.maximum(whole.sequences, 1)
        else:
            balance = batch_balance(routing, whole)
        loss += stage.router.balance_coef * balance
        metrics["moe/balance"] = balance
    return loss, metrics


def batch_balance(routing: dict[str, Routing], whole: Whole) -> jax.Array:
    """The balance term over all tokens of the optimiser batch, summed over the layers: of each, sum_e f_e P_e with f_e = X times
    the share of e in the choices, and P_e the mean share of e in the scores (arXiv 2101.03961, equations 4-6, for k choices).
    1 for even use. f has no gradient and P is a sum over tokens, so micro-batches add up to the whole."""
    total = jnp.float32(0.0)
    for path, each in routing.items():
        counts = jax.lax.stop_gradient(each.counts if whole.counts is None else whole.counts[path])
        frequency = counts.shape[-1] * counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1.0)
        total += jnp.sum(frequency * each.share) / jnp.maximum(whole.tokens, 1)
    return total


def moved_biases(still: dict[str, jax.Array], routing: dict[str, Routing], rate: float) -> dict[str, jax.Array]:
    """The weights without a gradient after an update: selection biases of routers move by the counts of the whole batch."""
    return {
        path: bias_update(array, routing[path.removesuffix(_BIAS)].counts, rate) if path.endswith(_BIAS) else array
        for path, array in still.items()
    }


def load_metrics(routing: dict[str, Routing]) -> dict[str, jax.Array]:
    """Of the whole batch. moe/max_load: choices of the busiest expert over the mean, the worst of all layers; moe/dropped: the
    share of all choices that no expert computed, where some may be dropped."""
    loads = [each.counts.max(axis=-1) / jnp.maximum(each.counts.mean(axis=-1), 1.0) for each in routing.values()]
    metrics = {"moe/max_load": jnp.max(jnp.concatenate(loads))} if loads else {}
    dropped = [each.dropped.sum() for each in routing.values() if each.dropped is not None]
    if dropped:
        metrics["moe/dropped"] = sum(dropped) / jnp.maximum(sum(each.counts.sum() for each in routing.values()), 1.0)
    return metrics
