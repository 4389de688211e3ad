"""Losses that the layers bring along, beside the one of the algorithm. R repeats of a stack, X experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from policy.experts.router import bias_update
from policy.heads.multi_token_prediction import predicted
from policy.intermediates import Aux, Indexing, Predictions, Routing
from policy.modes import first_of_segment
from rl.config.stage import StageOptions
from rl.training.batch import Batch

_BIAS = ".feed_forward.router.correction_bias"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """What a micro-batch has to know of the whole optimiser batch: sequences, tokens that are not padding, tokens trained on, and
    choices of each expert float32[R, X] by path of the layer (None: this micro-batch is the whole)."""

    sequences: jax.Array
    tokens: jax.Array
    segments: jax.Array
    mask: jax.Array
    counts: dict[str, jax.Array] | None = None

    def predicted(self, d: int) -> jax.Array:
        """Tokens trained on that prediction module d predicts, at least 1: a predicted token has more before it."""
        return jnp.maximum(jnp.sum(self.mask * predicted(self.segments, d)), 1.0)


def totals(batch: Batch) -> Totals:
    real = batch.segments != 0
    sequences = jnp.sum(first_of_segment(batch.segments) & real)
    return Totals(sequences, jnp.sum(real), batch.segments, batch.mask)


def auxiliary_loss(
    stage: StageOptions, aux: Aux, micro: Batch, whole: Totals
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the losses of the parts, each with its coefficient, and their metrics."""
    loss, metrics = jnp.float32(0.0), {}
    if routing := aux.by_layer("routing"):
        if stage.router.balance == "sequence":
            balance = sum(each.balance.sum() for each in routing.values()) / jnp.maximum(whole.sequences, 1)
        else:
            balance = batch_balance(routing, whole)
        metrics["moe/balance"] = balance
        if stage.indexer.training != "dense_warmup":  # a constant there: the routers stay
            loss += stage.router.balance_coef * balance
    if indexing := aux.by_layer("indexing"):
        per_layer, found = _indexer_terms(list(indexing.values()), whole.tokens)
        loss += stage.indexer.coef * per_layer.sum()
        metrics |= found
    if aux.predictions is not None:
        found = _prediction(aux.predictions, micro, whole)
        loss += stage.mtp.coef * found["mtp/loss"]
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


def _prediction(predictions: Predictions, micro: Batch, whole: Totals) -> dict[str, jax.Array]:
    """Cross-entropy and agreement of the prediction modules: means over the tokens trained on that a module predicts, then over
    the modules (arXiv 2412.19437, equations 24 and 25)."""
    depth = len(predictions.logp)
    share = jnp.stack([micro.mask / whole.predicted(d) for d in range(1, depth + 1)]) / depth
    return {"mtp/loss": -jnp.sum(predictions.logp * share), "mtp/acceptance": jnp.sum(predictions.agrees * share)}


def batch_balance(routing: dict[str, Routing], whole: Totals) -> jax.Array:
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
        path: bias_update(array, routing[layer].counts, rate)
        if (layer := path.removesuffix(_BIAS)) in routing
        else array
        for path, array in still.items()
    }


def load_metrics(routing: dict[str, Routing]) -> dict[str, jax.Array]:
    """Of the whole batch. moe/max_load: choices of the busiest expert over the mean, the worst of all layers; moe/dropped: the
    share of all choices that no expert computed, where some may be dropped; where routes are replayed moe/replayed, the share of
    choices that were given, and moe/replay_disagreement, the share of these that the router would not have made."""
    loads = [each.counts.max(axis=-1) / jnp.maximum(each.counts.mean(axis=-1), 1.0) for each in routing.values()]
    metrics = {"moe/max_load": jnp.max(jnp.concatenate(loads))} if loads else {}
    choices = sum(each.counts.sum() for each in routing.values())
    dropped = [each.dropped.sum() for each in routing.values() if each.dropped is not None]
    if dropped:
        metrics["moe/dropped"] = sum(dropped) / jnp.maximum(choices, 1.0)
    replayed = [each.replayed for each in routing.values() if each.replayed is not None]
    if replayed:
        given, disagreed = (sum(getattr(each, name).sum() for each in replayed) for name in ("given", "disagreed"))
        metrics["moe/replayed"] = given / jnp.maximum(choices, 1.0)
        metrics["moe/replay_disagreement"] = disagreed / jnp.maximum(given, 1.0)
    return metrics
