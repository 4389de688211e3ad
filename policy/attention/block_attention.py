"""Attention, on every platform, that skips blocks of tokens which do not see each other.

The places of a row are cut into blocks of one size. A list of pairs of blocks, made on the device,
says which queries may see which keys. A loop as long as the list updates the running softmax of the
queries of each pair with its keys, as policy/attention/ring_attention.py does with the keys of
other devices. So the work of a packed row follows what its sequences see, while all batches of one
shape share a program.

It serves calls whose queries see tokens of the call only, in the order of sequences or, for trees,
in preorder (`Step.contiguous`), in rows of at least two blocks. It computes trees
(policy/cache/paths.py) and, where the runtime allows it (`Runtime.skip_blocks`), segments, on a CPU
in rows of at least SHORTEST_FLAT tokens. It has no sinks, no layers that look ahead and no
indexers. Where it does not serve a call, `attend` returns None, and the caller uses the dense form
(policy/attention/dot_product_attention.py), which is its oracle. On TPU and GPU kernels
(policy/attention/flash_attention.py) serve bfloat16 before it. `python benchmarks/packing.py
--attention` measures sizes of blocks on a CPU, next to the dense form.

B rows, T tokens, H query heads, K key-value heads, G = H / K, D and V dimensions of keys and
values, S places of a block, n = T / S blocks of a row, I pairs of blocks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from policy.attention.dot_product_attention import MASKED, AttentionBounds, Mask
from policy.cache.layer_cache import Visible, own_tokens
from policy.cache.step import Step
from policy.config import Runtime
from policy.mesh.explicit import over_devices

# Places of a block by platform. On a CPU small blocks compute few scores that nothing sees, and
# XLA computes the products of larger ones no faster; elsewhere larger products use the device
# better (docs/decisions.md).
SIZES = {"cpu": 48}
OTHERWISE = 256
# Places of a block on a CPU in rows of at least LONG_ROW tokens, or for heads of more than
# WIDE_HEAD numbers: there blocks of 48 are slower.
LARGER_ON_CPU = 64
LONG_ROW = 1024
WIDE_HEAD = 64
# Shorter rows of segments are computed by the dense form on a CPU.
SHORTEST_FLAT = 256
NEVER = np.iinfo(np.int32).max


class BlockSpec(NamedTuple):
    """Everything about a call that is known when it is compiled: the places of a block and the
    bounds of attention."""

    size: int
    bounds: AttentionBounds


class BlockPairs(NamedTuple):
    """The pairs of blocks whose tokens may see each other.

    rows, queries, keys: int32[I], the row, the block of the queries and the block of the keys.
    number: how many of the I are pairs; the others mean nothing.
    """

    rows: jax.Array
    queries: jax.Array
    keys: jax.Array
    number: jax.Array


def served(step: Step, runtime: Runtime) -> bool:
    """Tells whether blocks serve a call over its own tokens."""
    T = step.segments.shape[1]
    layout = runtime.layout
    if (
        not step.contiguous
        or 2 * _least_size(runtime) > T
        or (layout is not None and layout.cache_rows_differ)
    ):
        return False
    long_enough = T >= SHORTEST_FLAT or _platform(runtime) != "cpu"
    return step.tree is not None or (runtime.skip_blocks and long_enough)


def _platform(runtime: Runtime) -> str:
    return jax.default_backend() if runtime.layout is None else runtime.layout.platform


def _least_size(runtime: Runtime) -> int:
    return SIZES.get(_platform(runtime), OTHERWISE)


def _size(runtime: Runtime, T: int, D: int) -> int:
    """Returns the places of a block in rows of T tokens, for heads of D numbers."""
    least = _least_size(runtime)
    larger = _platform(runtime) == "cpu" and (T >= LONG_ROW or D > WIDE_HEAD)
    return max(least, LARGER_ON_CPU) if larger else least


def attend(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    step: Step,
    runtime: Runtime,
    bounds: AttentionBounds = AttentionBounds(),
    sinks_H: jax.Array | None = None,
) -> jax.Array | None:
    """Computes softmax(q k^T) v, [B, H, T, V], with the scale already in q. Returns None if
    `served` is false, if there are sinks, or if queries look ahead.

    `bounds` and `sinks` are those of the dense form. The output and the logarithm of the sum of
    each softmax have the name "context" for rematerialisation. On a mesh every device computes its
    own rows and heads.
    """
    if sinks_H is not None or bounds.looks_ahead or not served(step, runtime):
        return None
    layout = runtime.layout
    T, D = q_BHTD.shape[2:]
    spec = BlockSpec(_size(runtime, T, D), bounds)
    mask = Mask(step, own_tokens(step, {}))
    if layout is None or layout.mesh.size == 1:
        return block_attention(spec, q_BHTD, k_BKTD, v_BKTV, mask.queries[:2], mask.keys)
    q_spec = layout.spec(("batch", "heads", None, None), q_BHTD.shape)
    H = q_BHTD.shape[1]
    K = k_BKTD.shape[1]
    if 1 < K < H and layout.spec(("batch", "kv_heads", None, None), k_BKTD.shape)[1] != q_spec[1]:
        # The mesh cuts query heads only: every device needs the keys of its own.
        k_BKTD, v_BKTV = (jnp.repeat(a, H // K, axis=1) for a in (k_BKTD, v_BKTV))
    rows = PartitionSpec(q_spec[0])
    keys = PartitionSpec(q_spec[0], q_spec[1] if k_BKTD.shape[1] > 1 else None)
    run = over_devices(
        partial(block_attention, spec),
        layout.mesh,
        (q_spec, keys, keys, rows, rows),
        q_spec,
        check_vma=False,
    )
    return run(q_BHTD, k_BKTD, v_BKTV, mask.queries[:2], mask.keys)


def block_attention(
    spec: BlockSpec,
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    queries: tuple,
    keys: tuple,
) -> jax.Array:
    """Runs the attention of one device: [B, H, T, V]. T is padded to full blocks, of segment 0.

    queries, keys: positions and `Step.segments` (in trees the nodes) and, for keys in trees,
    `Tree.last`, int32[B, T].
    """
    (B, H, T, D), K = q_BHTD.shape, k_BKTD.shape[1]

    def padded(a: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(a, [(0, -T % spec.size if i == axis else 0) for i in range(a.ndim)])

    q, k, v = (padded(a, a.ndim - 2) for a in (q_BHTD.reshape(B, K, H // K, T, D), k_BKTD, v_BKTV))
    queries, keys = (tuple(padded(a, 1) for a in tokens) for tokens in (queries, keys))
    out = cast(jax.Array, _attend_blocks(spec, q, k, v, queries, keys))
    return out[:, :, :, :T].reshape(B, H, T, -1)


def pairs(spec: BlockSpec, queries: tuple, keys: tuple) -> BlockPairs:
    """Lists the pairs of blocks of which a query may see a key, in the order of rows, queries and
    keys.

    Blocks are a pair if all of this holds, each for some key and some query, so a few pairs have
    nothing to see:
    - the block of keys is that of the queries, or comes before it;
    - the node of a key is no later than that of a query (in rows of segments, the segment);
    - the last node below that of a key is no earlier than the node of a query;
    - by the smallest and largest positions of both, a key may be no later than a query, and inside
      of its window and chunk.
    """
    positions, nodes = queries
    last = keys[-1]  # without trees the segments: each is its own last node
    B, T = nodes.shape
    bounds = spec.bounds
    n = T // spec.size

    def extremes(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the smallest and the largest entry of the real tokens of each block, [B, n]."""
        real = nodes != 0
        smallest = jnp.where(real, a, NEVER).reshape(B, n, spec.size).min(axis=2)
        return smallest, jnp.where(real, a, -1).reshape(B, n, spec.size).max(axis=2)

    def at_most(of_keys: jax.Array, of_queries: jax.Array) -> jax.Array:
        """Returns bool[B, n, n]: whether the entry of a block of keys is at most that of a block of
        queries."""
        return of_keys[:, None, :] <= of_queries[:, :, None]

    def at_least(of_keys: jax.Array, of_queries: jax.Array) -> jax.Array:
        return of_keys[:, None, :] >= of_queries[:, :, None]

    first_node, last_node = extremes(nodes)
    low, high = extremes(positions)
    _, end = extremes(last)
    meet = jnp.tril(jnp.ones((n, n), bool)) & at_most(low, high)
    meet &= at_most(first_node, last_node) & at_least(end, first_node)
    if bounds.window:
        meet &= low[:, :, None] - high[:, None, :] < bounds.window
    if bounds.chunk:
        low = low // bounds.chunk
        high = high // bounds.chunk
        meet &= at_most(low, high) & at_least(high, low)
    rows, of_queries, of_keys = jnp.nonzero(meet, size=B * n * (n + 1) // 2, fill_value=0)
    return BlockPairs(rows, of_queries, of_keys, meet.sum())


def _take(a: jax.Array, row: jax.Array, block: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns block `block` of row `row`, with a leading axis of 1; the places of a row are at
    `axis`."""
    starts = [row if i == 0 else block * size if i == axis else 0 for i in range(a.ndim)]
    return jax.lax.dynamic_slice(
        a, starts, [1 if i == 0 else size if i == axis else d for i, d in enumerate(a.shape)]
    )


def _put(a: jax.Array, part: jax.Array, row: jax.Array, block: jax.Array, axis: int) -> jax.Array:
    """Returns `a` with the block that `_take` reads there replaced by `part`."""
    starts = [
        row if i == 0 else block * part.shape[axis] if i == axis else 0 for i in range(a.ndim)
    ]
    return jax.lax.dynamic_update_slice(a, part, starts)


def _scores(spec: BlockSpec, q_1KGSD: jax.Array, k_1KSD: jax.Array, queries: tuple, keys: tuple):
    """Returns (the scores of a pair of blocks, float32[1, K, G, S, S], with -inf at keys that are
    not seen, and the slope of the soft cap, 1 without one)."""
    scores = jnp.einsum("bkgtd,bkcd->bkgtc", q_1KGSD, k_1KSD, preferred_element_type=jnp.float32)
    slope = 1.0
    bounds = spec.bounds
    if bounds.softcap is not None:
        capped = jnp.tanh(scores / bounds.softcap)
        scores = bounds.softcap * capped
        slope = 1.0 - jnp.square(capped)
    mask = Mask(Step(*queries), Visible({}, *keys), bounds.window, bounds.chunk)
    return jnp.where(mask.of(*queries)[:, None, None], scores, -jnp.inf), slope


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(
    spec: BlockSpec, q_BKGTD, k_BKTD, v_BKTV, queries: tuple, keys: tuple
) -> jax.Array:
    return _attend_pairs(spec, q_BKGTD, k_BKTD, v_BKTV, queries, keys)[0]


def _forward(spec: BlockSpec, q, k, v, queries: tuple, keys: tuple):
    # Rules of gradients may be traced outside the caller's context of precision.
    with _precision(q):
        return _attend_pairs(spec, q, k, v, queries, keys)


def _backward(spec: BlockSpec, saved: tuple, g_out: jax.Array):
    with _precision(g_out):
        return *_gradients(spec, saved, g_out), None, None


def _precision(a: jax.Array):
    return jax.default_matmul_precision("highest" if a.dtype == jnp.float32 else "default")


def _attend_pairs(spec: BlockSpec, q, k, v, queries: tuple, keys: tuple):
    """Returns (softmax(q k^T) v, what the backward pass reads)."""
    listed = pairs(spec, queries, keys)

    def add(m, state):
        row = listed.rows[m]
        i = listed.queries[m]
        j = listed.keys[m]
        own, seen = (
            tuple(_take(a, row, at, spec.size, 1) for a in tokens)
            for tokens, at in ((queries, i), (keys, j))
        )
        q_block = _take(q, row, i, spec.size, 3)
        k_block, v_block = (_take(a, row, j, spec.size, 2) for a in (k, v))
        top, total, out = (_take(a, row, i, spec.size, 3) for a in state)
        scores, _ = _scores(spec, q_block, k_block, own, seen)
        new = jnp.maximum(top, scores.max(axis=-1))
        e = jnp.exp(scores - new[..., None])
        shrunk = jnp.exp(top - new)
        values = jnp.einsum(
            "bkgtc,bkcd->bkgtd", e.astype(v.dtype), v_block, preferred_element_type=jnp.float32
        )
        added = new, total * shrunk + e.sum(axis=-1), out * shrunk[..., None] + values
        return tuple(_put(a, part, row, i, 3) for a, part in zip(state, added, strict=True))

    shape = q.shape[:4]
    start = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1]))
    top, total, out = jax.lax.fori_loop(0, listed.number, add, start)
    # Padding has no keys.
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out = checkpoint_name((out / safe[..., None]).astype(v.dtype), "context")
    lse = checkpoint_name(jnp.where(some, top + jnp.log(safe), 0.0), "context")
    return out, (q, k, v, queries, keys, listed, out, lse)


def _gradients(
    spec: BlockSpec, saved: tuple, g_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of queries, keys and values, pair by pair.

    With the softmax sums known, p = exp(score - lse) is the weight of a key and ds = p (g v -
    delta), delta = g out, the gradient of its score.
    """
    q, k, v, queries, keys, listed, out, lse = saved
    # As a product of matrices: XLA on CPU needs a hundred times as long for the same sum of a
    # product.
    delta = jnp.einsum("bkgtd,bkgtd->bkgt", g_out, out, preferred_element_type=jnp.float32)

    def add(m, state):
        row = listed.rows[m]
        i = listed.queries[m]
        j = listed.keys[m]
        own, seen = (
            tuple(_take(a, row, at, spec.size, 1) for a in tokens)
            for tokens, at in ((queries, i), (keys, j))
        )
        q_block, g, delta_block, lse_block = (
            _take(a, row, i, spec.size, 3) for a in (q, g_out, delta, lse)
        )
        k_block, v_block = (_take(a, row, j, spec.size, 2) for a in (k, v))
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores, slope = _scores(spec, q_block, k_block, own, seen)
        p = jnp.exp(scores - lse_block[..., None])
        towards = product("bkgtd,bkcd->bkgtc", g, v_block) - delta_block[..., None]
        ds = (p * towards * slope).astype(q.dtype)
        new = (
            product("bkgtc,bkcd->bkgtd", ds, k_block),
            product("bkgtc,bkgtd->bkcd", ds, q_block),
            product("bkgtc,bkgtd->bkcd", p.astype(g.dtype), g),
        )
        at = (i, 3), (j, 2), (j, 2)
        return tuple(
            _put(a, _take(a, row, block, spec.size, axis) + part, row, block, axis)
            for a, part, (block, axis) in zip(state, new, at, strict=True)
        )

    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (q, k, v))
    totals = jax.lax.fori_loop(0, listed.number, add, start)
    g_q, g_k, g_v = (total.astype(a.dtype) for total, a in zip(totals, (q, k, v), strict=True))
    return g_q, g_k, g_v


_attend_blocks.defvjp(_forward, _backward)
