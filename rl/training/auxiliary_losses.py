"""Computes auxiliary losses: router balance, indexers, prediction modules.

They are added to the loss of the algorithm. L repeats of a stack, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from policy.cache.paths import Tree, first, scored
from policy.experts.router import bias_update
from policy.intermediates import Aux, Indexing, Predictions, Routing
from rl.config.stage import StageOptions
from rl.training.batch import Batch

_BIAS = ".feed_forward.router.correction_bias"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """Totals of the mini-batch, which a micro-batch needs.

    sequences: how many. tokens: of all sequences. segments, mask, tree: as in Batch. counts:
    choices of each expert, float32[L, X] by path of the layer; None: the micro-batch is the
    mini-batch.
    """

    sequences: jax.Array
    tokens: jax.Array
    segments: jax.Array
    mask: jax.Array
    tree: Tree | None = None
    counts: dict[str, jax.Array] | None = None

    def predicted(self, d: int) -> jax.Array:
        """Returns how many trained tokens prediction module d predicts, at least 1."""
        return jnp.maximum(jnp.sum(self.mask * scored(self.segments, self.tree, d + 1)), 1.0)


def totals(batch: Batch) -> Totals:
    """Counts the totals of a mini-batch."""
    tokens = batch.segments != 0 if batch.tree is None else batch.tree.count
    return Totals(
        jnp.sum(first(batch.segments, batch.tree)),
        jnp.sum(tokens),
        batch.segments,
        batch.mask,
        batch.tree,
    )


def auxiliary_loss(
    stage: StageOptions, aux: Aux, micro: Batch, batch_totals: Totals
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the share of a micro-batch in the auxiliary losses, times their coefficients;
    metrics)."""
    loss = jnp.float32(0.0)
    metrics = {}
    if routing := cast(dict[str, Routing], aux.by_layer("routing")):
        if stage.router.balance == "sequence":
            balance = sum(each.balance.sum() for each in routing.values()) / jnp.maximum(
                batch_totals.sequences, 1
            )
        else:
            balance = batch_balance(routing, batch_totals)
        metrics["moe/balance"] = balance
        if stage.indexer.training != "dense_warmup":  # a constant there: routers are not trained
            loss += stage.router.balance_coef * balance
    if indexing := cast(dict[str, Indexing], aux.by_layer("indexing")):
        per_layer, indexer_metrics = _indexer_terms(list(indexing.values()), batch_totals.tokens)
        loss += stage.indexer.coef * per_layer.sum()
        metrics |= indexer_metrics
    if aux.predictions is not None:
        mtp_metrics = _prediction(aux.predictions, micro, batch_totals)
        assert stage.mtp is not None  # prediction modules run only with these settings
        loss += stage.mtp.coef * mtp_metrics["mtp/loss"]
        metrics |= mtp_metrics
    return loss, metrics


def _indexer_terms(
    indexing: list[Indexing], tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (divergence of each layer, float32[layers], a mean over tokens; metrics).

    The loss is the sum over layers. The gradient of an indexer therefore does not depend on the
    number of layers.
    """

    def per_layer(arrays):
        return jnp.concatenate(arrays) / jnp.maximum(tokens, 1)

    divergence = per_layer([each.divergence for each in indexing])
    metrics = {"indexer/kl": divergence.mean()}
    if indexing[0].recall is not None:
        metrics["indexer/recall"] = per_layer([each.recall for each in indexing]).mean()
    return divergence, metrics


def _prediction(
    predictions: Predictions, micro: Batch, batch_totals: Totals
) -> dict[str, jax.Array]:
    """Returns the cross-entropy and the acceptance of the prediction modules.

    Each is a mean over the trained tokens that a module predicts, then over modules (arXiv
    2412.19437, equations 24 and 25).
    """
    depth = len(predictions.logp)
    share = jnp.stack([micro.mask / batch_totals.predicted(d) for d in range(1, depth + 1)]) / depth
    return {
        "mtp/loss": -jnp.sum(predictions.logp * share),
        "mtp/acceptance": jnp.sum(predictions.agrees * share),
    }


def batch_balance(routing: dict[str, Routing], batch_totals: Totals) -> jax.Array:
    """Returns the balance term over all tokens of the mini-batch, summed over layers.

    A layer contributes sum_e f_e P_e, where f_e is X times the share of e in the choices and P_e is
    the mean share of e in the scores (arXiv 2101.03961, equations 4-6, for k choices). It is 1 for
    even use. f has no gradient and P is a sum over tokens, so micro-batches add up to the
    mini-batch.
    """
    total = jnp.float32(0.0)
    for path, each in routing.items():
        counts = jax.lax.stop_gradient(
            each.counts if batch_totals.counts is None else batch_totals.counts[path]
        )
        frequency = counts.shape[-1] * counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1.0)
        total += jnp.sum(frequency * each.share) / jnp.maximum(batch_totals.tokens, 1)
    return total


def updated_biases(
    biases: dict[str, jax.Array], routing: dict[str, Routing], rate: float
) -> dict[str, jax.Array]:
    """Returns the trained weights without a gradient after an update.

    They are router biases, which follow the token counts of the mini-batch."""
    return {
        path: bias_update(array, routing[layer].counts, rate)
        if (layer := path.removesuffix(_BIAS)) in routing
        else array
        for path, array in biases.items()
    }


def load_metrics(routing: dict[str, Routing]) -> dict[str, jax.Array]:
    """Returns the router metrics of the mini-batch.

    moe/max_load: choices of the busiest expert over the mean, the largest of all layers.
    moe/dropped: share of choices that no expert computed, if experts may drop tokens. moe/replayed:
    share of choices that were replayed. moe/replay_disagreement: share of the replayed choices that
    differ from the choice of the router.
    """
    loads = [
        each.counts.max(axis=-1) / jnp.maximum(each.counts.mean(axis=-1), 1.0)
        for each in routing.values()
    ]
    metrics = {"moe/max_load": jnp.max(jnp.concatenate(loads))} if loads else {}
    choices = sum(each.counts.sum() for each in routing.values())
    dropped = [each.dropped.sum() for each in routing.values() if each.dropped is not None]
    if dropped:
        metrics["moe/dropped"] = sum(dropped) / jnp.maximum(choices, 1.0)
    replayed = [each.replayed for each in routing.values() if each.replayed is not None]
    if replayed:
        forced, disagreed = (
            sum(getattr(each, name).sum() for each in replayed) for name in ("given", "disagreed")
        )
        metrics["moe/replayed"] = forced / jnp.maximum(choices, 1.0)
        metrics["moe/replay_disagreement"] = disagreed / jnp.maximum(forced, 1.0)
    return metrics
