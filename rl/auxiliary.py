"""Losses that the layers bring along, beside the one of the algorithm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.intermediates import Aux, Indexing
from policy.layers.moe import bias_update
from rl.config import StageOptions

_BIAS = ".feed_forward.router.correction_bias"


def auxiliary_loss(stage: StageOptions, aux: Aux, segments_NT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This micro-batch's share of the losses of the parts, each with its coefficient, and their metrics. `segments` are those of
    the whole optimiser batch."""
    loss, metrics = jnp.float32(0.0), {}
    if routing := aux.found("routing"):
        sequences = jnp.sum(jnp.any(segments_NT != 0, axis=1))
        balance = sum(each.balance.sum() for each in routing.values()) / jnp.maximum(sequences, 1)
        metrics["moe/balance"] = balance
        if stage.indexer.training != "dense_warmup":  # a constant there: the routers stay
            loss += stage.router.balance_coef * balance
    if indexing := aux.found("indexing"):
        per_layer, found = _indexer_terms(list(indexing.values()), jnp.sum(segments_NT != 0))
        loss += stage.indexer.coef * per_layer.sum()
        metrics |= found
    return loss, metrics


def _indexer_terms(indexing: list[Indexing], tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(mean over the tokens of each layer's divergence float32[layers], metrics). The loss is their sum, so that what a layer's
    indexer learns does not depend on how many layers there are."""

    def per_layer(arrays):
        return jnp.concatenate(arrays) / jnp.maximum(tokens, 1)

    divergence = per_layer([each.divergence for each in indexing])
    metrics = {"indexer/kl": divergence.mean()}
    if indexing[0].recall is not None:
        metrics["indexer/recall"] = per_layer([each.recall for each in indexing]).mean()
    return divergence, metrics


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
