"""Attention over sequences that are cut over the mesh axis `context`: each of its p devices has t =
T / p tokens of a row.

Three schemes bring queries and keys together:

all_gather: each device receives the keys of all devices and attends from its own queries.
ring: keys travel from device to device in p steps (policy/attention/ring_attention.py).
ulysses: heads are cut in place of tokens during attention (arXiv 2309.14509), with all-to-alls
before and after.

Keys and values travel, or the parts they are computed from: latents are expanded where they arrive.
Numbers that a device receives per token of its own in a forward pass, with K key-value heads of D +
V numbers: all_gather and ring (p
- 1) K (D + V), with latents (p - 1) (c + Y) however many heads they make; ulysses (H + K) (D + V)
  (p - 1) / p.

Positions and segments travel along, and the mask between tokens is the mask of all other attention.
So rows may be packed, and the tokens of a device need not be neighbours
(policy/attention/sequence_shards.py).

B rows, T tokens, H query heads, K key-value heads, D and V dimensions of keys and values, c rank
of latents, Y dimension of their rotated part. Small letters are sizes on one device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.attention.attention_plan import AttentionPlan, Keys, TokenPositions
from policy.attention.dot_product_attention import AttentionBounds
from policy.attention.flash_attention import splash_attention
from policy.attention.ring_attention import ring
from policy.attention.sequence_shards import AXIS, cuts
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import Attention, DecoderConfig, LatentAttention, Runtime
from policy.mesh.explicit import over_devices
from policy.mesh.sharding import Layout

QUERIES = ("batch", "heads", "length", None)
KEYS = ("batch", "kv_heads", "length", None)


def check(config: DecoderConfig, runtime: Runtime, layout: Layout) -> None:
    """Raises ValueError if ulysses cannot cut the heads of this decoder over this mesh."""
    parts = layout.mesh.shape[AXIS]
    tensor = layout.mesh.shape["tensor"]
    if parts == 1 or runtime.context_parallel != "ulysses":
        return
    for mixer in (mixer for spec in config.layers for mixer in spec.mixers):
        match mixer:
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
                    f"context_parallel ulysses cuts the {of_device} {what} heads of a device over "
                    f"the {parts} devices along the mesh axis context, which do not divide them; "
                    "choose another number of devices, or all_gather or ring"
                )


def applies(cache: LayerCache | None, step: Step, runtime: Runtime) -> bool:
    """Tells whether the tokens of this call are cut: in training and scoring, on a mesh with an
    axis `context`."""
    return cache is None and cuts(runtime.layout, step.segments.shape[1])


def attend_cut(
    q_BHTD: jax.Array,
    keys: Keys,
    step: Step,
    runtime: Runtime,
    bounds: AttentionBounds = AttentionBounds(),
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q k^T) v, [B, H, T, V], as `attend` does, with the scale already in q.

    Queries and result are cut along T.
    """
    layout = runtime.layout
    H = q_BHTD.shape[1]
    assert layout is not None, "sequences are cut over a mesh"
    q_spec = layout.spec(QUERIES, q_BHTD.shape)
    if 1 < keys.parts[0].shape[1] < H and layout.spec(KEYS, keys.parts[0].shape)[1] != q_spec[1]:
        # The axis `tensor` cuts query heads only: every device needs the keys of its own.
        keys = Keys(tuple(jnp.repeat(a, H // a.shape[1], axis=1) for a in keys.parts))
    local = {"all_gather": _all_gather, "ring": ring, "ulysses": _ulysses}[runtime.context_parallel]
    plan = AttentionPlan.make_plan(keys, step, q_BHTD.dtype, bounds, runtime)
    kernel = None
    kernel_spec = PartitionSpec()
    if plan.kernel and local is _all_gather:
        heads = layout.sharding(QUERIES, q_BHTD.shape).shard_shape(q_BHTD.shape)[1]
        kernel, kernel_spec = plan.kernel.build(heads, layout)
    token = cast(Any, layout.spec(("batch", "length"), step.segments.shape))
    until = step.until if bounds.looks_ahead else None
    last = None if step.tree is None else step.tree.last
    where = TokenPositions(step.positions, step.segments, until, last)
    specs = (
        q_spec,
        jax.tree.map(lambda _: token, where),
        tuple(layout.spec(KEYS, a.shape) for a in keys.parts),
        tuple(layout.spec((None, "heads", None), a.shape) for a in keys.weights),
        PartitionSpec(q_spec[1]),
        kernel_spec,
    )
    run = over_devices(partial(local, plan), layout.mesh, specs, q_spec, check_vma=False)
    return run(q_BHTD, where, keys.parts, keys.weights, sinks_H, kernel)


def _all_gather_tree(tree, axis: int):
    return jax.tree.map(lambda a: jax.lax.all_gather(a, AXIS, axis=axis, tiled=True), tree)


def _all_gather(plan: AttentionPlan, q_bhtD, where: TokenPositions, parts, weights, sinks, kernel):
    (k, v), everywhere = plan.make(_all_gather_tree(parts, 2), weights), _all_gather_tree(where, 1)
    if plan.kernel:
        return plan.kernel.attend(
            kernel, q_bhtD, (k, v), (where.segments, everywhere.segments), sinks
        )
    return plan.attend(q_bhtD, where, k, v, everywhere, sinks)


def _ulysses(plan: AttentionPlan, q_bhtD, where: TokenPositions, parts, weights, sinks, _):
    """Exchanges parts with several heads as queries are exchanged.

    Every head needs a part with one head, so each device receives all of it.
    """
    p = plan.devices
    everywhere = _all_gather_tree(where, 1)

    def own(array, axis):
        """Returns the heads of this device."""
        size = array.shape[axis] // p
        return jax.lax.dynamic_slice_in_dim(array, size * jax.lax.axis_index(AXIS), size, axis)

    def exchange(a):
        return jax.lax.all_to_all(a, AXIS, split_axis=1, concat_axis=2, tiled=True)

    parts = tuple(_all_gather_tree(a, 2) if a.shape[1] == 1 else exchange(a) for a in parts)
    k, v = plan.make(parts, tuple(own(w, 1) for w in weights))
    q = exchange(q_bhtD)
    sinks = None if sinks is None else own(sinks, 0)
    if plan.kernel and plan.contiguous:
        out = splash_attention(q, k, v, everywhere.segments, sinks, plan.bounds)
    else:
        out = plan.attend(q, everywhere, k, v, everywhere, sinks)
    return jax.lax.all_to_all(out, AXIS, split_axis=2, concat_axis=1, tiled=True)
