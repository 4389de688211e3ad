"""Attention over the keys that an indexer selects (arXiv 2512.02556, section 2.1).

Decoding reads the selected latents alone. Training also computes the divergence that the indexer
learns from.

B rows, T queries, C visible keys, H heads, K key-value heads, D dimension, k selected keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.attention.dot_product_attention import MASKED, attend, in_chunks, of_chunks
from policy.attention.indexer import IndexedMask, SelectedMask
from policy.cache.layer_cache import LayerCache, gather_entries
from policy.config import Runtime
from policy.intermediates import Indexing, LayerAux


def attend_selected(
    q_BHTD: jax.Array,
    k_BKCD: jax.Array,
    v_BKCD: jax.Array,
    mask: IndexedMask | SelectedMask,
    cache: LayerCache | None,
    runtime: Runtime,
) -> tuple[jax.Array, LayerAux]:
    """Returns (softmax(q k^T) v over the selected keys [B, H, T, Dv], LayerAux), with the scale
    already in q.

    With a cache, k and v are its entries "latent". Without one, `Runtime.indexer` says whether the
    indexer learns; during its dense warm-up attention is over all visible keys. A mask that keeps
    its selection reports it.
    """
    chunk = runtime.attention_chunk
    aux = LayerAux()
    if isinstance(mask, IndexedMask):
        if mask.keeps or "selection" in runtime.record:
            aux = LayerAux(selection=_selection(mask, chunk))
        if cache is None and runtime.indexer != "off":
            out, indexing = _attend_and_teach(q_BHTD, k_BKCD, v_BKCD, mask, runtime)
            return out, aux.merge(LayerAux(indexing=indexing))
        if mask.keeps:  # keys are scored once
            assert aux.selection is not None
            mask = mask.selected(aux.selection)
    if cache is not None and _gathers(q_BHTD.shape[2], k_BKCD.shape[2], mask.topk):
        return _attend_copies(q_BHTD, v_BKCD.shape[-1], mask, cache), aux
    return attend(q_BHTD, k_BKCD, v_BKCD, mask, chunk), aux


def _selection(mask: IndexedMask, chunk: int) -> jax.Array:
    """Returns the columns that the mask selects, int32[B, T, k], -1 where there are fewer. Queries
    are taken in chunks as in `attend`."""

    def some(*queries):
        chosen, counts = mask.choose(*queries)
        return jnp.where(counts, chosen, -1)

    T = mask.queries[0].shape[1]
    if chunk >= T:
        return some(*mask.queries)
    parts = tuple(in_chunks(a, chunk, 1) for a in mask.queries)
    return of_chunks(jax.lax.map(lambda queries: some(*queries), parts), 1)[:, :T]


def _gathers(T: int, C: int, topk: int) -> bool:
    """Tells whether copying the selected latents out of the cache costs less than reading all of
    it.

    The copies are T topk rows, written and read once, each for one query; the mask form reads the C
    rows once for all queries.
    """
    return T * topk < C


def _attend_copies(
    q_BHTD: jax.Array, v_dim: int, mask: IndexedMask | SelectedMask, cache: LayerCache
) -> jax.Array:
    """Attends to copies of the selected latents: [B, H, T, v_dim]. Values are the first `v_dim`
    numbers of a latent."""
    chosen, counts = mask.choose(*mask.queries)
    latents = gather_entries(cache, "latent", chosen, q_BHTD.dtype)[:, 0]
    scores = jnp.einsum("bhtd,btkd->bhtk", q_BHTD, latents, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(counts[:, None], scores, MASKED), axis=-1).astype(
        latents.dtype
    )
    return jnp.einsum("bhtk,btkd->bhtd", weights, latents[..., :v_dim])


def _attend_and_teach(
    q_BHTD: jax.Array, k_BHCD: jax.Array, v_BHCD: jax.Array, mask: IndexedMask, runtime: Runtime
):
    """Returns (attention [B, H, T, Dv], Indexing).

    The indexer learns from the attention weights of the output itself, so the divergence costs no
    product except the index scores, which the selection needs anyway. Queries are taken in chunks
    as in `attend`: at most [B, H, chunk, C] weights exist at a time, and the backward pass
    recomputes them once for output and divergence.
    """
    T = q_BHTD.shape[2]
    chunk = runtime.attention_chunk
    dense = runtime.indexer == "dense_warmup"
    of_queries = (*mask.queries, *mask.counts)

    def some(q_BHtD, *of_queries):
        queries = of_queries[: len(mask.queries)]
        counts = of_queries[len(mask.queries) :]
        visible = mask.visible(*queries)
        index = mask.scores(*queries[2:])
        kept = mask.kept(visible, index)
        allowed = visible if dense else kept
        scores = jnp.einsum("bhtd,bhcd->bhtc", q_BHtD, k_BHCD, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, MASKED), axis=-1)
        out = jnp.einsum("bhtc,bhcd->bhtd", weights.astype(v_BHCD.dtype), v_BHCD)
        p = jax.lax.stop_gradient(weights).sum(axis=1)
        return out, _compared(p, index, allowed, kept if dense else None, *counts)

    if chunk >= T:
        return some(q_BHTD, *of_queries)
    parts = (in_chunks(a, chunk, axis) for a, axis in ((q_BHTD, 2), *((a, 1) for a in of_queries)))
    out, indexing = jax.lax.map(jax.checkpoint(lambda xs: some(*xs)), tuple(parts))
    return of_chunks(out, 2)[:, :, :T], jax.tree.map(lambda a: a.sum(axis=0), indexing)


def _compared(p_BTC, scores_BTC, allowed_BTC, kept_BTC, counts_BT=None) -> Indexing:
    """Returns the divergence of softmax(scores) from p over the allowed keys, and the share of p on
    the kept keys.

    p: the attention weights, summed over heads. Padding adds 0 to both: none of its keys is
    allowed. counts: how many sequences a query of a tree stands for.
    """
    p = p_BTC / jnp.maximum(p_BTC.sum(axis=-1, keepdims=True), 1e-30)
    log_q = jax.nn.log_softmax(jnp.where(allowed_BTC, scores_BTC, MASKED), axis=-1)
    terms = jnp.where(allowed_BTC & (p > 0), p * (jnp.log(jnp.where(p > 0, p, 1.0)) - log_q), 0.0)
    if counts_BT is not None:
        terms = terms * counts_BT[..., None]
        p = p * counts_BT[..., None]
    return Indexing(terms.sum(), None if kept_BTC is None else jnp.sum(p, where=kept_BTC))
