"""Attention over sequences that are cut over the mesh axis `context`: each of its p devices has t = T / p tokens of a row, their
queries and their keys. Three ways to bring queries and keys together:

all_gather: the keys of all devices come to each, which attends from its own queries.
ring: keys go from device to device in p steps, and each device adds up what it meets (arXiv 2310.01889). Forwards and backwards a
device holds keys of two devices at a time, and blocks of keys that none of its queries may see are passed over.
ulysses: heads are cut in place of tokens while attention lasts (arXiv 2309.14509): all-to-alls before and after.

What travels are keys and values, or what they are made of: latents are expanded where they arrive. Numbers that a device receives
for each of its tokens in a forward pass, with K key-value heads of D + V numbers: all_gather and ring (p - 1) K (D + V), of latents
(p - 1) (c + R) however many heads they make; ulysses (H + K) (D + V) (p - 1) / p.

Who may look at whom follows from positions and segments, which travel along, by the masks of all other attention: rows may be
packed, and the tokens of a device need not be neighbours (policy/attention/sequence_shards.py).

B rows, T tokens, H query heads, K key-value heads, G = H / K, D and V dimensions of keys and values, c and R of latents. Small
letters are what a device has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from policy.attention.dot_product_attention import MASKED, Mask, attend, in_chunks, of_chunks
from policy.attention.flash_attention import CutQueries, splash_attention
from policy.attention.sequence_shards import AXIS, balanced_places, cuts
from policy.cache.cache import LayerCache, Visible
from policy.cache.step import Step
from policy.config import Attention, DecoderConfig, LatentAttention, Runtime
from policy.mesh.explicit import over_devices
from policy.mesh.sharding import Layout

QUERIES, KEYS = ("batch", "heads", "length", None), ("batch", "kv_heads", "length", None)


class Limits(NamedTuple):
    """What bounds attention besides segments and order; see `Mask` and `attend`."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None


class Where(NamedTuple):
    """Where tokens sit: position in the document and segment, int32[b, t]."""

    positions: jax.Array
    segments: jax.Array


def _themselves(parts, weights):
    return parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """What keys and values are made of, by `make(parts, weights) -> (k, v)`: `parts` [B, K or 1, T, ?] of each token, and weights
    [?, H, ?] by head. Without weights the parts are keys and values themselves."""

    parts: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...] = ()
    make: Callable = field(default=_themselves, metadata={"static": True})


def check(config: DecoderConfig, runtime: Runtime, layout: Layout) -> None:
    """Raises ValueError where ulysses cannot cut the heads of this decoder over this mesh."""
    parts, tensor = layout.mesh.shape[AXIS], layout.mesh.shape["tensor"]
    if parts == 1 or runtime.context_parallel != "ulysses":
        return
    for spec in config.layers:
        match spec.mixer:
            case Attention(heads=H, kv_heads=K):
                K = H if H % tensor == 0 and K % tensor and K > 1 else K
            case LatentAttention(heads=H):
                K = 1
            case _:
                continue
        for what, heads in (("query", H), ("key-value", K)):
            of_device = heads // tensor if heads % tensor == 0 else heads
            if of_device % parts and (of_device > 1 or what == "query"):
                raise ValueError(
                    f"context_parallel ulysses cuts the {of_device} {what} heads of a device over the {parts} devices along the "
                    f"mesh axis context, which do not divide them; choose another number of devices, or all_gather or ring"
                )


def applies(cache: LayerCache | None, step: Step, runtime: Runtime) -> bool:
    """Whether the tokens of this call are cut: training and scoring, on a mesh with an axis `context`."""
    return cache is None and cuts(runtime.layout, step.segments.shape[1])


def attend_cut(
    q_BHTD: jax.Array,
    keys: Keys,
    step: Step,
    runtime: Runtime,
    limits: Limits = Limits(),
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T) v, [B, H, T, V], as `attend`, the scale already in q. Queries and result are cut along T."""
    layout, H = runtime.layout, q_BHTD.shape[1]
    q_spec = layout.spec(QUERIES, q_BHTD.shape)
    if 1 < keys.parts[0].shape[1] < H and layout.spec(KEYS, keys.parts[0].shape)[1] != q_spec[1]:
        # The axis `tensor` cuts query heads only: every device needs the keys of its own.
        keys = Keys(tuple(jnp.repeat(a, H // a.shape[1], axis=1) for a in keys.parts))
    local = {"all_gather": _all_gather, "ring": _ring, "ulysses": _ulysses}[runtime.context_parallel]
    how = How.of(keys, step, q_BHTD.dtype, limits, runtime)
    kernel, kernel_spec = None, PartitionSpec()
    if how.kernel and local is _all_gather:
        kernel, kernel_spec = how.kernel.made(
            layout.sharding(QUERIES, q_BHTD.shape).shard_shape(q_BHTD.shape)[1], layout
        )
    token = layout.spec(("batch", "length"), step.segments.shape)
    places = (
        q_spec,
        Where(token, token),
        tuple(layout.spec(KEYS, a.shape) for a in keys.parts),
        tuple(layout.spec((None, "heads", None), a.shape) for a in keys.weights),
        PartitionSpec(q_spec[1]),
        kernel_spec,
    )
    run = over_devices(partial(local, how), layout.mesh, places, q_spec, check_vma=False)
    return run(q_BHTD, Where(step.positions, step.segments), keys.parts, keys.weights, sinks_H, kernel)


@dataclass(frozen=True)
class How:
    """What is known of a call when it is compiled. `whole`: tokens lie in order. `balanced`: each device has two runs of
    neighbours. `kernel`: the one for TPUs; None: the portable form."""

    devices: int
    limits: Limits
    chunk: int
    make: Callable
    whole: bool
    balanced: bool
    kernel: CutQueries | None

    @classmethod
    def of(cls, keys: Keys, step: Step, dtype, limits: Limits, runtime: Runtime) -> How:
        p, kernel = runtime.layout.mesh.shape[AXIS], None
        if limits.chunk is None:
            places = balanced_places(step.segments.shape[1], p) if step.balanced else None
            kernel = CutQueries.of(step, dtype, runtime, AXIS, (limits.window, limits.softcap), places)
        return cls(p, limits, runtime.attention_chunk, keys.make, step.whole, step.balanced, kernel)

    def mask(self, queries: Where, keys: Where) -> Mask:
        return Mask(Step(*queries), Visible({}, *keys), self.limits.window, self.limits.chunk)

    def attend(self, q, queries: Where, k, v, keys: Where, sinks) -> jax.Array:
        return attend(q, k, v, self.mask(queries, keys), self.chunk, self.limits.softcap, sinks)

    # The ring.

    @property
    def runs(self) -> int:
        """Runs of neighbours of a device."""
        return 2 if self.balanced else 1

    def split(self, tree, axis: int) -> list:
        """The arrays of each run."""
        leaves, structure = jax.tree.flatten(tree)
        return [structure.unflatten(run) for run in zip(*(jnp.split(a, self.runs, axis) for a in leaves), strict=True)]

    def seen(self, device, other, size: int) -> list[list]:
        """For each run of `device` and each of `other`, `size` tokens each: whether a query of the first may see a key of the
        second. None: not known without the positions."""
        if not (self.whole or self.balanced):
            return [[None]]
        last = 2 * self.devices - 1

        def places(number):
            return (number, last - number) if self.balanced else (number,)

        def sees(query, key):
            reach = self.limits.window and (query - key - 1) * size + 1 < self.limits.window
            return (key <= query) if reach is None else (key <= query) & reach

        return [[sees(query, key) for key in places(other)] for query in places(device)]

    def by_chunks(self, function, *arrays, remat: bool = False):
        """`function` of arrays [b, K, G, t, ...] or [b, t], a chunk of queries at a time."""
        axes = [1 if a.ndim == 2 else 3 for a in arrays]
        t = arrays[0].shape[axes[0]]
        if self.chunk >= t:
            return function(*arrays)
        parts = tuple(in_chunks(a, self.chunk, axis) for a, axis in zip(arrays, axes, strict=True))
        function = jax.checkpoint(function) if remat else function
        found = jax.lax.map(lambda xs: function(*xs), parts)
        return jax.tree.map(lambda a: of_chunks(a, 3)[:, :, :, :t], found)

    def scores(self, q_bKGtD, k_bKtD) -> jax.Array:
        scores = jnp.einsum("bkgtd,bkcd->bkgtc", q_bKGtD, k_bKtD, preferred_element_type=jnp.float32)
        return scores if self.limits.softcap is None else self.limits.softcap * jnp.tanh(scores / self.limits.softcap)


def _gathered(tree, axis: int):
    return jax.tree.map(lambda a: jax.lax.all_gather(a, AXIS, axis=axis, tiled=True), tree)


def _all_gather(how: How, q_bhtD, where: Where, parts, weights, sinks, kernel):
    (k, v), everywhere = how.make(_gathered(parts, 2), weights), _gathered(where, 1)
    if how.kernel:
        return how.kernel.attend(kernel, q_bhtD, (k, v), (where.segments, everywhere.segments), sinks)
    return how.attend(q_bhtD, where, k, v, everywhere, sinks)


def _ulysses(how: How, q_bhtD, where: Where, parts, weights, sinks, _):
    """Parts with several heads are exchanged like queries; of those with one the devices need all, for other heads."""
    p, everywhere = how.devices, _gathered(where, 1)

    def own(array, axis):
        """The heads of this device."""
        size = array.shape[axis] // p
        return jax.lax.dynamic_slice_in_dim(array, size * jax.lax.axis_index(AXIS), size, axis)

    def exchange(a):
        return jax.lax.all_to_all(a, AXIS, split_axis=1, concat_axis=2, tiled=True)

    parts = tuple(_gathered(a, 2) if a.shape[1] == 1 else exchange(a) for a in parts)
    k, v = how.make(parts, tuple(own(w, 1) for w in weights))
    q, sinks = exchange(q_bhtD), None if sinks is None else own(sinks, 0)
    if how.kernel and how.whole:
        limits = {"window": how.limits.window, "softcap": how.limits.softcap}
        out = splash_attention(q, k, v, everywhere.segments, sinks, **limits)
    else:
        out = how.attend(q, everywhere, k, v, everywhere, sinks)
    return jax.lax.all_to_all(out, AXIS, split_axis=2, concat_axis=1, tiled=True)


def _ring(how: How, q_bhtD, where: Where, parts, weights, sinks, _):
    K = jax.eval_shape(how.make, parts, weights)[0].shape[1]
    b, h, t, D = q_bhtD.shape
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, h // K)
    return _around(how, q_bhtD.reshape(b, K, h // K, t, D), where, parts, weights, sinks).reshape(b, h, t, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(how: How, q_bKGtD, where: Where, parts, weights, sinks):
    return _met(how, q_bKGtD, where, parts, weights, sinks)[0]


def _next(tree, how: How):
    """The arrays of the device before this one."""
    pairs = [(i, (i + 1) % how.devices) for i in range(how.devices)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, pairs), tree)


def _where_seen(seen, function, otherwise):
    """function() where `seen`, or where that is not known (None)."""
    return function() if seen is None else jax.lax.cond(seen, function, lambda: otherwise)


def _met(how: How, q, where: Where, parts, weights, sinks):
    """(softmax(q k^T) v over the keys of all devices, the logarithms of its sums float32[b, K, G, t])."""
    values = jax.eval_shape(how.make, parts, weights)[1].shape[-1]
    if sinks is None:
        top, total = jnp.full(q.shape[:4], MASKED), jnp.zeros(q.shape[:4])
    else:
        top, total = jnp.broadcast_to(sinks[:, :, None], q.shape[:4]), jnp.ones(q.shape[:4])
    start = top, total, jnp.zeros((*q.shape[:4], values))
    queries = list(zip(how.split(q, 3), how.split(where, 1), strict=True))
    device, size = jax.lax.axis_index(AXIS), q.shape[3] // how.runs

    def step(carry, i):
        (parts, there), states = carry
        arriving = _next((parts, there), how)
        seen = how.seen(device, (device - i) % how.devices, size)
        for m, (some, keys) in enumerate(zip(how.split(parts, 2), how.split(there, 1), strict=True)):
            for n, (q, here) in enumerate(queries):
                add = partial(_added, how, q, here, states[n], how.make, some, weights, keys)
                states[n] = _where_seen(seen[n][m], add, states[n])
        return (arriving, states), None

    (_, states), _ = jax.lax.scan(step, ((parts, where), how.split(start, 3)), jnp.arange(how.devices))
    top, total, out = jax.tree.map(lambda *runs: jnp.concatenate(runs, axis=3), *states)
    # Padding has no keys.
    some, safe = total > 0, jnp.where(total > 0, total, 1.0)
    out = (out / safe[..., None]).astype(q.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(jnp.where(some, top + jnp.log(safe), 0.0), "context")


def _added(how: How, q, here: Where, state, make, parts, weights, there: Where):
    """`state` (largest score, sum of exponentials, sum of values) with these keys."""
    k, v = make(parts, weights)
    mask = how.mask(here, there)

    def some(q, positions, segments, top, total, out):
        allowed = mask.of(positions, segments)[:, None, None]
        scores = jnp.where(allowed, how.scores(q, k), MASKED)
        new = jnp.maximum(top, scores.max(axis=-1))
        e, shrunk = jnp.where(allowed, jnp.exp(scores - new[..., None]), 0.0), jnp.exp(top - new)
        found = jnp.einsum("bkgtc,bkcd->bkgtd", e.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new, total * shrunk + e.sum(axis=-1), out * shrunk[..., None] + found

    return how.by_chunks(some, q, *here, *state)


def _around_forward(how: How, q, where, parts, weights, sinks):
    out, lse = _met(how, q, where, parts, weights, sinks)
    return out, (q, where, parts, weights, sinks, out, lse)


def _around_backward(how: How, saved, g_out):
    with jax.default_matmul_precision(
        "highest" if g_out.dtype == jnp.float32 else "default"
    ):  # traced outside the caller's
        return _slopes(how, saved, g_out)


def _slopes(how: How, saved, g_out):
    """With the sums known a block of keys stands alone: as a function of queries and keys of the block, the sum of
    exp(score - lse) (g v - delta), delta = g out, has the gradient of the whole. The gradients of keys travel with them, and are
    home after p steps."""
    q, where, parts, weights, sinks, out, lse = saved
    g = g_out.astype(jnp.float32)
    delta = jnp.sum(g * out.astype(jnp.float32), axis=-1)
    queries = list(zip(how.split(q, 3), how.split(where, 1), how.split((g_out, delta, lse), 3), strict=True))
    device, size = jax.lax.axis_index(AXIS), q.shape[3] // how.runs

    def zeros(tree):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

    def plus(total, new):
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, new)

    def step(carry, i):
        (parts, there, g_parts), g_queries, g_weights = carry
        arriving = _next((parts, there), how)
        seen, runs = how.seen(device, (device - i) % how.devices, size), how.split(g_parts, 2)
        for m, (some, keys) in enumerate(zip(how.split(parts, 2), how.split(there, 1), strict=True)):
            for n, (q, here, known) in enumerate(queries):
                slopes = jax.grad(partial(_surrogate, how, here, keys, known), argnums=(0, 1, 2))
                totals = (g_queries[n], runs[m], g_weights)
                found = _where_seen(
                    seen[n][m], lambda q=q, some=some, s=slopes, t=totals: plus(t, s(q, some, weights)), totals
                )
                g_queries[n], runs[m], g_weights = found
        g_parts = jax.tree.map(lambda *each: jnp.concatenate(each, axis=2), *runs)
        return ((*arriving, _next(g_parts, how)), g_queries, g_weights), None

    start = (parts, where, zeros(parts)), how.split(zeros(q), 3), zeros(weights)
    ((_, _, g_parts), g_queries, g_weights), _ = jax.lax.scan(step, start, jnp.arange(how.devices))
    g_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[:, :, None] - lse) * delta, axis=(0, 3))
    g_q = jnp.concatenate(g_queries, axis=3).astype(q.dtype)
    g_parts, g_weights = jax.tree.map(lambda g, a: g.astype(a.dtype), (g_parts, g_weights), (parts, weights))
    return g_q, None, g_parts, g_weights, g_sinks


def _surrogate(how: How, here: Where, there: Where, known, q, parts, weights) -> jax.Array:
    k, v = how.make(parts, weights)
    mask = how.mask(here, there)

    def some(q, positions, segments, g, delta, lse):
        scores = jnp.where(mask.of(positions, segments)[:, None, None], how.scores(q, k), MASKED)
        towards = jnp.einsum("bkgtd,bkcd->bkgtc", g, v, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.exp(scores - lse[..., None]) * (towards - delta[..., None]), axis=-1)

    return how.by_chunks(some, q, *here, *known, remat=True).sum()


_around.defvjp(_around_forward, _around_backward)
