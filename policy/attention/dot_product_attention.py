"""The dense form of attention, and the mask that says which keys a query sees.

B rows, T queries, C visible keys, H query heads, K key-value heads, G = H / K, D head dimension.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.cache.layer_cache import Visible
from policy.cache.step import Step
from policy.mesh.explicit import in_explicit_mode, over_devices, spec_of

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class AttentionBounds(NamedTuple):
    """Bounds of attention besides segments and order; `Mask` explains `window`, `chunk` and
    `looks_ahead`, `attend` explains `softcap`."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    looks_ahead: bool = False


class Mask:
    """Allows keys of the same document, or in trees of the path, that are not padding and not in
    the future.

    window: a query looks back at most so many tokens, itself included. chunk: key and query lie in
    the same chunk of positions. looks_ahead: where the step has blocks (`Step.until`), a query sees
    keys up to the end of its block.
    """

    def __init__(
        self,
        step: Step,
        visible: Visible,
        window: int | None = None,
        chunk: int | None = None,
        looks_ahead: bool = False,
    ):
        ahead = (step.until,) if looks_ahead and step.until is not None else ()
        self.queries = (step.positions, step.segments, *ahead)
        self.keys = (
            visible.positions,
            visible.segments,
            *(() if visible.last is None else (visible.last,)),
        )
        self.window = window
        self.chunk = chunk

    def between(self, queries: tuple, keys: tuple) -> Mask:
        """Returns the same rule for other queries and keys."""
        other = copy.copy(self)
        other.queries = queries
        other.keys = keys
        return other

    def of(
        self, positions_BT: jax.Array, segments_BT: jax.Array, until_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the mask bool[B, T, C] of some queries. The arguments are the arrays of
        `queries`, cut along T."""
        k_positions, k_segments, *k_last = (a[:, None, :] for a in self.keys)
        positions = positions_BT[..., None]
        segments = segments_BT[..., None]
        back = positions - k_positions
        seen = back >= 0 if until_BT is None else k_positions <= until_BT[..., None]
        same = (
            (k_segments <= segments) & (segments <= k_last[0]) if k_last else segments == k_segments
        )
        allowed = seen & same & (segments != 0)
        if self.window:
            allowed &= back < self.window
        if self.chunk:
            allowed &= positions // self.chunk == k_positions // self.chunk
        return allowed


def attend(
    q_BHTD: jax.Array,
    k_BKCD: jax.Array,
    v_BKCD: jax.Array,
    mask: Mask,
    chunk: int,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
    *,
    has_transposed_keys: bool = False,
) -> jax.Array:
    """Computes softmax(q k^T) v with the scale already in q and the softmax in float32: [B, H, T,
    Dv].

    chunk: more queries than this are taken in chunks whose scores are recomputed in the backward
    pass, so that memory
        grows with T, not with T^2.
    softcap: c bounds the scores by c tanh(s / c), before the mask.
    sinks: one more score of each head, without a value.
    has_transposed_keys: as in `Visible`.
    """
    if in_explicit_mode():
        return _by_device(q_BHTD, k_BKCD, v_BKCD, mask, chunk, softcap, sinks_H)
    B, H, T, D = q_BHTD.shape
    K = k_BKCD.shape[1]
    q = q_BHTD.reshape(B, K, H // K, T, D)
    sinks = None if sinks_H is None else sinks_H.reshape(K, H // K, 1, 1)

    def some(q_BKGtD, *queries):
        if T == 1 and not has_transposed_keys:
            # Keys [C, D] on the left are read where they are; on the right XLA on CPU transposes
            # them for every token. Keys that lie as [D, C] are read where they are on the right.
            scores = jnp.einsum(
                "bkcd,bkgtd->bkcgt", k_BKCD, q_BKGtD, preferred_element_type=jnp.float32
            )
            scores = jnp.moveaxis(scores, 2, -1)
        else:
            scores = jnp.einsum(
                "bkgtd,bkcd->bkgtc", q_BKGtD, k_BKCD, preferred_element_type=jnp.float32
            )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(mask.of(*queries)[:, None, None], scores, MASKED)
        weights = _softmax(scores, sinks).astype(v_BKCD.dtype)
        return jnp.einsum("bkgtc,bkcd->bkgtd", weights, v_BKCD)

    if chunk >= T:
        out = some(q, *mask.queries)
    else:
        parts = (in_chunks(a, chunk, axis) for a, axis in ((q, 3), *((a, 1) for a in mask.queries)))
        out = jax.lax.map(jax.checkpoint(lambda xs: some(*xs)), tuple(parts))
        out = of_chunks(out, 3)[:, :, :, :T]
    return out.reshape(B, H, T, v_BKCD.shape[-1])


def _by_device(q_BHTD, k_BKCD, v_BKCD, mask: Mask, chunk: int, softcap, sinks_H) -> jax.Array:
    """Runs `attend` on every device with its own rows and heads."""
    H = q_BHTD.shape[1]
    K = k_BKCD.shape[1]
    heads = spec_of(q_BHTD)[1]
    if 1 < K < H and spec_of(k_BKCD)[1] != heads:
        # The mesh cuts query heads only: every device needs the keys of its own.
        k_BKCD, v_BKCD = (jnp.repeat(a, H // K, axis=1) for a in (k_BKCD, v_BKCD))
    rows = PartitionSpec(spec_of(q_BHTD)[0])
    keys = PartitionSpec(*rows, heads if k_BKCD.shape[1] > 1 else None)

    def local(q, k, v, queries, keys, sinks):
        return attend(q, k, v, mask.between(queries, keys), chunk, softcap, sinks)

    specs = spec_of(q_BHTD), keys, keys, rows, rows, PartitionSpec(heads)
    run = over_devices(local, None, specs, spec_of(q_BHTD), check_vma=False)
    return run(q_BHTD, k_BKCD, v_BKCD, mask.queries, mask.keys, sinks_H)


def in_chunks(a: jax.Array, chunk: int, axis: int) -> jax.Array:
    """Pads `axis` to a multiple of `chunk` and cuts it into chunks, which become axis 0."""
    a = jnp.pad(a, [(0, -a.shape[axis] % chunk if i == axis else 0) for i in range(a.ndim)])
    return jnp.moveaxis(a.reshape(*a.shape[:axis], -1, chunk, *a.shape[axis + 1 :]), axis, 0)


def of_chunks(a: jax.Array, axis: int) -> jax.Array:
    """Inverts `in_chunks`, except that the padding stays."""
    a = jnp.moveaxis(a, 0, axis)
    return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Computes the softmax over the last axis; `sinks` take their share of the sum."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
    e = jnp.exp(scores - top)
    return e / (jnp.sum(e, axis=-1, keepdims=True) + jnp.exp(sinks - top))
