"""Ring attention (arXiv 2310.01889): keys travel from device to device in p steps, and each device
adds up what its queries see.

Forwards and backwards a device holds the keys of two devices at a time. Blocks of keys that none of
its queries may see are skipped.

B rows, T tokens, H query heads, K key-value heads, G = H / K, D and V dimensions of keys and
values, p devices. Small letters are sizes on one device.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from policy.attention.attention_plan import AttentionPlan, TokenPositions
from policy.attention.dot_product_attention import MASKED, in_chunks, of_chunks
from policy.attention.sequence_shards import AXIS
from policy.ops.page_blocks import OnlineSoftmax


def _runs(plan: AttentionPlan) -> int:
    """Counts the runs of neighbours of a device."""
    return 2 if plan.balanced else 1


def _split(plan: AttentionPlan, tree, axis: int) -> list:
    """Splits the arrays of a tree into one tree per run of neighbours."""
    leaves, structure = jax.tree.flatten(tree)
    return [
        structure.unflatten(run)
        for run in zip(*(jnp.split(a, _runs(plan), axis) for a in leaves), strict=True)
    ]


def _seen(plan: AttentionPlan, device, other, size: int) -> list[list]:
    """Tells for each run of `device` and each run of `other`, `size` tokens each, whether a query
    of the first may see a key of the second. None: not known without the positions."""
    if not (plan.contiguous or plan.balanced):
        return [[None]]
    last = 2 * plan.devices - 1
    window = None if plan.trees else plan.bounds.window

    def places(number):
        return (number, last - number) if plan.balanced else (number,)

    def sees(query, key):
        reach = window and (query - key - 1) * size + 1 < window
        return (key <= query) if reach is None else (key <= query) & reach

    return [[sees(query, key) for key in places(other)] for query in places(device)]


def _by_chunks(plan: AttentionPlan, function, *arrays: jax.Array, remat: bool = False):
    """Applies `function` to arrays [b, K, G, t, ...] or [b, t], one chunk of queries at a time."""
    axes = [1 if a.ndim == 2 else 3 for a in arrays]
    t = arrays[0].shape[axes[0]]
    if plan.chunk >= t:
        return function(*arrays)
    parts = tuple(in_chunks(a, plan.chunk, axis) for a, axis in zip(arrays, axes, strict=True))
    function = jax.checkpoint(function) if remat else function
    chunks = jax.lax.map(lambda xs: function(*xs), parts)
    return jax.tree.map(lambda a: of_chunks(a, 3)[:, :, :, :t], chunks)


def _scores(plan: AttentionPlan, q_bKGtD: jax.Array, k_bKtD: jax.Array) -> jax.Array:
    scores = jnp.einsum("bkgtd,bkcd->bkgtc", q_bKGtD, k_bKtD, preferred_element_type=jnp.float32)
    softcap = plan.bounds.softcap
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def ring(
    plan: AttentionPlan,
    q_bhtD: jax.Array,
    where: TokenPositions,
    parts: tuple,
    weights: tuple,
    sinks: jax.Array | None,
    kernel: None,
) -> jax.Array:
    """Attends from the queries of this device to the keys of all devices: [b, h, t, V]. Runs inside
    `jax.shard_map`."""
    K = jax.eval_shape(plan.make, parts, weights)[0].shape[1]
    b, h, t, D = q_bhtD.shape
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, h // K)
    out = cast(
        jax.Array, _around(plan, q_bhtD.reshape(b, K, h // K, t, D), where, parts, weights, sinks)
    )
    return out.reshape(b, h, t, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(
    plan: AttentionPlan, q_bKGtD, where: TokenPositions, parts, weights, sinks
) -> jax.Array:
    return _attend_around(plan, q_bKGtD, where, parts, weights, sinks)[0]


def _next(tree, plan: AttentionPlan):
    """Receives the arrays of the device before this one."""
    pairs = [(i, (i + 1) % plan.devices) for i in range(plan.devices)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, pairs), tree)


def _where_seen(seen, function, otherwise):
    """Returns function() where `seen` is true or unknown (None), else `otherwise`."""
    return function() if seen is None else jax.lax.cond(seen, function, lambda: otherwise)


def _attend_around(plan: AttentionPlan, q, where: TokenPositions, parts, weights, sinks):
    """Returns (softmax(q k^T) v over the keys of all devices, the logarithm of each softmax sum
    float32[b, K, G, t])."""
    values = jax.eval_shape(plan.make, parts, weights)[1].shape[-1]
    if sinks is None:
        top = jnp.full(q.shape[:4], MASKED)
        total = jnp.zeros(q.shape[:4])
    else:
        top = jnp.broadcast_to(sinks[:, :, None], q.shape[:4])
        total = jnp.ones(q.shape[:4])
    start = OnlineSoftmax(top, total, jnp.zeros((*q.shape[:4], values)))
    queries = list(zip(_split(plan, q, 3), _split(plan, where, 1), strict=True))
    device = jax.lax.axis_index(AXIS)
    size = q.shape[3] // _runs(plan)

    def step(carry, i):
        (parts, there), states = carry
        arriving = _next((parts, there), plan)
        seen = _seen(plan, device, (device - i) % plan.devices, size)
        for m, (some, keys) in enumerate(
            zip(_split(plan, parts, 2), _split(plan, there, 1), strict=True)
        ):
            for n, (q, here) in enumerate(queries):
                add = partial(_added, plan, q, here, states[n], plan.make, some, weights, keys)
                states[n] = _where_seen(seen[n][m], add, states[n])
        return (arriving, states), None

    (_, states), _ = jax.lax.scan(
        step, ((parts, where), _split(plan, start, 3)), jnp.arange(plan.devices)
    )
    top, total, out = jax.tree.map(lambda *runs: jnp.concatenate(runs, axis=3), *states)
    # Padding has no keys.
    some = total > 0
    safe = jnp.where(total > 0, total, 1.0)
    out = (out / safe[..., None]).astype(q.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(
        jnp.where(some, top + jnp.log(safe), 0.0), "context"
    )


def _added(
    plan: AttentionPlan,
    q: jax.Array,
    here: TokenPositions,
    state: OnlineSoftmax,
    make,
    parts,
    weights,
    there: TokenPositions,
) -> OnlineSoftmax:
    """Adds these keys to the softmax `state` of queries."""
    k, v = make(parts, weights)
    mask = plan.mask(here, there)

    def some(q, positions, segments, top, total, out):
        allowed = mask.of(positions, segments)[:, None, None]
        scores = jnp.where(allowed, _scores(plan, q, k), MASKED)
        new = jnp.maximum(top, scores.max(axis=-1))
        e = jnp.where(allowed, jnp.exp(scores - new[..., None]), 0.0)
        shrunk = jnp.exp(top - new)
        values = jnp.einsum(
            "bkgtc,bkcd->bkgtd", e.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return OnlineSoftmax(new, total * shrunk + e.sum(axis=-1), out * shrunk[..., None] + values)

    return _by_chunks(plan, some, q, here.positions, here.segments, *state)


def _around_forward(plan: AttentionPlan, q, where, parts, weights, sinks):
    out, lse = _attend_around(plan, q, where, parts, weights, sinks)
    return out, (q, where, parts, weights, sinks, out, lse)


def _around_backward(plan: AttentionPlan, saved, g_out):
    # The backward pass is traced outside the caller's context of precision.
    with jax.default_matmul_precision("highest" if g_out.dtype == jnp.float32 else "default"):
        return _gradients(plan, saved, g_out)


def _gradients(plan: AttentionPlan, saved, g_out):
    """Computes the gradients of queries, parts, weights and sinks, block by block.

    With the softmax sums known, each block of keys is independent: the sum of exp(score - lse) (g v
    - delta), delta = g out, over the block has the gradient of the full attention with respect to
    the block's queries and keys. The gradients of keys travel with the keys and are back at their
    device after p steps.
    """
    q, where, parts, weights, sinks, out, lse = saved
    g = g_out.astype(jnp.float32)
    delta = jnp.sum(g * out.astype(jnp.float32), axis=-1)
    queries = list(
        zip(
            _split(plan, q, 3),
            _split(plan, where, 1),
            _split(plan, (g_out, delta, lse), 3),
            strict=True,
        )
    )
    device = jax.lax.axis_index(AXIS)
    size = q.shape[3] // _runs(plan)

    def zeros(tree):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

    def plus(total, new):
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, new)

    def step(carry, i):
        (parts, there, g_parts), g_queries, g_weights = carry
        arriving = _next((parts, there), plan)
        seen = _seen(plan, device, (device - i) % plan.devices, size)
        runs = _split(plan, g_parts, 2)
        for m, (some, keys) in enumerate(
            zip(_split(plan, parts, 2), _split(plan, there, 1), strict=True)
        ):
            for n, (q, here, known) in enumerate(queries):
                slopes = jax.grad(partial(_surrogate, plan, here, keys, known), argnums=(0, 1, 2))
                totals = (g_queries[n], runs[m], g_weights)
                totals = _where_seen(
                    seen[n][m],
                    lambda q=q, some=some, s=slopes, t=totals: plus(t, s(q, some, weights)),
                    totals,
                )
                g_queries[n], runs[m], g_weights = totals
        g_parts = jax.tree.map(lambda *each: jnp.concatenate(each, axis=2), *runs)
        return ((*arriving, _next(g_parts, plan)), g_queries, g_weights), None

    start = (parts, where, zeros(parts)), _split(plan, zeros(q), 3), zeros(weights)
    ((_, _, g_parts), g_queries, g_weights), _ = jax.lax.scan(step, start, jnp.arange(plan.devices))
    g_sinks = (
        None if sinks is None else -jnp.sum(jnp.exp(sinks[:, :, None] - lse) * delta, axis=(0, 3))
    )
    g_q = jnp.concatenate(g_queries, axis=3).astype(q.dtype)
    g_parts, g_weights = jax.tree.map(
        lambda g, a: g.astype(a.dtype), (g_parts, g_weights), (parts, weights)
    )
    return g_q, None, g_parts, g_weights, g_sinks


def _surrogate(
    plan: AttentionPlan, here: TokenPositions, there: TokenPositions, known, q, parts, weights
) -> jax.Array:
    """Returns the sum whose gradient is that block's part of the gradient of attention;
    `_gradients` gives the formula."""
    k, v = plan.make(parts, weights)
    mask = plan.mask(here, there)

    def some(q, positions, segments, g, delta, lse):
        scores = jnp.where(mask.of(positions, segments)[:, None, None], _scores(plan, q, k), MASKED)
        towards = jnp.einsum("bkgtd,bkcd->bkgtc", g, v, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.exp(scores - lse[..., None]) * (towards - delta[..., None]), axis=-1)

    return _by_chunks(plan, some, q, here.positions, here.segments, *known, remat=True).sum()


_around.defvjp(_around_forward, _around_backward)
