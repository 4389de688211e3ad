"""Attention of full sequences by kernels that store no scores.

The kernel is jax's splash attention on TPU and policy/attention/gpu_attention.py on GPU. Where
neither can compute a call, `attend` returns None, and the caller uses the dense form
(policy/attention/dot_product_attention.py), which is the kernels' oracle. Trees of sequences
(policy/cache/paths.py) are computed by splash attention with the mask as an array, or by
policy/attention/block_attention.py.

The kernels serve calls whose queries see tokens of the call only (`Step.contiguous`): training,
scoring, and the first tokens of a prompt.

B rows, T tokens, H query heads, K key-value heads, D dimension of queries and keys, V that of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.typing import DTypeLike

from policy.attention import gpu_attention
from policy.attention.dot_product_attention import AttentionBounds, Mask
from policy.cache.layer_cache import own_tokens
from policy.cache.step import Step
from policy.config import Runtime
from policy.mesh.explicit import over_devices
from policy.mesh.sharding import Layout

LANES = 128
# Queries and keys of a block.
BLOCK = 512
# With fewer tokens a kernel does not pay.
FEWEST = 128
# Tokens of the longest row of trees: the kernels read three masks of 4 bytes for each pair of
# tokens.
LONGEST_TREES = 8192


def served(step: Step, dtype: DTypeLike, runtime: Runtime, platform: str = "tpu") -> bool:
    """Tells whether the kernel of a platform serves a call over its own tokens, if query and key
    heads are cut the same way."""
    return step.tree is None and _here(step, dtype, runtime, platform)


def _here(step: Step, dtype: DTypeLike, runtime: Runtime, platform: str) -> bool:
    # Float32 means products at the highest precision, which the kernels do not have.
    here = (
        runtime.layout is not None and runtime.layout.platform == platform and dtype == jnp.bfloat16
    )
    return here and step.contiguous and step.segments.shape[1] >= FEWEST


def serves_trees(step: Step, dtype: DTypeLike, runtime: Runtime) -> bool:
    """Tells whether the kernel of a TPU serves a call over trees, if query and key heads are cut
    the same way."""
    return (
        step.tree is not None
        and step.segments.shape[1] <= LONGEST_TREES
        and _here(step, dtype, runtime, "tpu")
    )


def attend(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    step: Step,
    runtime: Runtime,
    bounds: AttentionBounds = AttentionBounds(),
    sinks_H: jax.Array | None = None,
) -> jax.Array | None:
    """Computes softmax(q k^T) v, [B, H, T, V], with the scale already in q. Returns None where no
    kernel serves the call.

    `bounds` and `sinks` are those of the dense form. The output and, on TPU, the logarithm of the
    sum of each softmax have the name "context" for rematerialisation; the output only once, since
    each name is saved.
    """
    layout = runtime.layout
    plain = bounds == AttentionBounds() and sinks_H is None
    dtype = q_BHTD.dtype
    dims = (q_BHTD.shape[-1], v_BKTV.shape[-1])
    tokens: Any = step.segments
    if serves_trees(step, dtype, runtime):
        mask = Mask(step, own_tokens(step, {}), bounds.window, bounds.chunk, bounds.looks_ahead)
        kernel = _named(partial(tree_attention, mask=mask, softcap=bounds.softcap))
        tokens = (mask.queries, mask.keys)
    elif bounds.chunk is not None or bounds.looks_ahead:
        return None
    elif served(step, dtype, runtime):
        kernel = partial(splash_attention, bounds=bounds)
    elif plain and served(step, dtype, runtime, "gpu") and gpu_attention.supports_heads(*dims):
        kernel = _named(gpu_attention.flash_attention)
    else:
        return None
    assert layout is not None, "a served call has a layout"
    if layout.mesh.size == 1:
        return kernel(q_BHTD, k_BKTD, v_BKTV, tokens, sinks_H)
    return _on_mesh(kernel, layout, q_BHTD, k_BKTD, v_BKTV, tokens, sinks_H)


def _named(kernel: Callable) -> Callable:
    """Gives the result of a kernel the name "context"; `splash_attention` does so itself."""

    def run(*arguments: Any, **options: Any) -> jax.Array:
        return checkpoint_name(kernel(*arguments, **options), "context")

    return run


def _on_mesh(kernel, layout: Layout, q_BHTD, k_BKTD, v_BKTV, tokens, sinks_H) -> jax.Array | None:
    """Runs a kernel on every device with its own rows and heads. tokens: arrays [B, T].

    None where the mesh cuts query and key heads differently.
    """
    rows, heads, kv_heads = (
        ("cache_batch", *["cache_heads"] * 2)
        if layout.cache_rows_differ
        else ("batch", "heads", "kv_heads")
    )
    q_spec = layout.spec((rows, heads, None, None), q_BHTD.shape)
    k_spec = layout.spec((rows, kv_heads, None, None), k_BKTD.shape)
    if q_spec != k_spec:
        return None
    specs = (q_spec, k_spec, k_spec, jax.sharding.PartitionSpec(q_spec[0]))
    arguments = (q_BHTD, k_BKTD, v_BKTV, tokens)
    if sinks_H is None:
        kernel = partial(kernel, sinks_H=None)
    else:
        arguments = (*arguments, sinks_H)
        specs = (*specs, jax.sharding.PartitionSpec(q_spec[1]))
    return over_devices(kernel, layout.mesh, specs, q_spec, check_vma=False)(*arguments)


def splash_attention(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    segments_BT: jax.Array,
    sinks_H: jax.Array | None,
    bounds: AttentionBounds = AttentionBounds(),
    interpret: bool = False,
) -> jax.Array:
    """Runs splash attention on one device: [B, H, T, V]. T is padded to full blocks, of segment
    0."""
    H, T = q_BHTD.shape[1:3]
    filling = -T % LANES
    q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, filling), (0, 0))) for a in (q_BHTD, k_BKTD, v_BKTV))
    segments = jnp.pad(segments_BT, ((0, 0), (0, filling)))
    run = _kernel(H, np.arange(T + filling, dtype=np.int32), 1, bounds, interpret)
    return _by_rows(run, q, (k, v), (segments, segments), sinks_H)[:, :, :T]


def tree_attention(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    tokens: tuple[tuple, tuple],
    sinks_H: jax.Array | None,
    mask: Mask,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Runs splash attention with the mask as an array on one device: [B, H, T, V]. T is padded to
    full blocks.

    tokens: the arrays [B, T] of `mask.queries` and `mask.keys`. The rows are computed one after the
    other, since the mask of a row takes T^2 bytes, and more in the kernel; the backward pass makes
    it again.
    """
    T = q_BHTD.shape[2]
    filling = -T % LANES
    q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, filling), (0, 0))) for a in (q_BHTD, k_BKTD, v_BKTV))
    rows = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, filling)))[:, None], tokens)
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32)

    def attend_row(q_HTD, k_KTD, v_KTV, row, sinks):
        queries, keys = row
        allowed = mask.between(queries, keys).of(*queries)
        # Padding sees itself: the kernel divides by the sum over what a query sees.
        allowed |= jnp.eye(T + filling, dtype=bool)
        return _kernel_of_mask(allowed, softcap, interpret)(q_HTD, k_KTD, v_KTV, None, sinks)

    policy = jax.checkpoint_policies.save_only_these_names("context")
    attend_row = jax.checkpoint(attend_row, policy=policy)
    return jax.lax.map(
        lambda row: attend_row(row[0], row[1], row[2], row[3], sinks), (q, k, v, rows)
    )[:, :, :T]


def _kernel_of_mask(mask_1TT: jax.Array, softcap: float | None, interpret: bool):
    """Builds the kernel of a mask that all heads share and that is known on the device only."""
    kernel = splash.make_splash_mha(
        mask=mask_1TT,
        block_sizes=_block_sizes(mask_1TT.shape[1]),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="context",
        interpret=interpret,
    )
    # Inside of jit the function above makes an array of the flag, and the kernel cannot branch on
    # it.
    infos = cast(Any, (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
    return splash.SplashAttentionKernel(
        *(info._replace(is_dynamic_mask=True) for info in infos), **kernel.kwargs
    )


def _block_sizes(tokens: int) -> splash.BlockSizes:
    """Returns the largest blocks that divide the tokens of a device."""
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if tokens % size == 0)
    return splash.BlockSizes(block, block, block, block, block, block, block, block)


def _kernel(
    H: int, places_T: np.ndarray, devices: int, bounds: AttentionBounds, interpret: bool = False
):
    """Builds the kernel for H heads, keys in order, and the queries at these places of a row.

    Each of the `devices` has an equal part of the queries.
    """
    T = len(places_T)
    window = bounds.window
    mask = (
        masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    )
    mask.q_sequence = places_T
    return splash.make_splash_mha(
        mask=masks.MultiHeadMask([mask] * H),
        block_sizes=_block_sizes(T // devices),
        head_shards=1,
        q_seq_shards=devices,
        attn_logits_soft_cap=bounds.softcap,
        residual_checkpoint_name="context",
        interpret=interpret,
    )


def _by_rows(
    run: Callable, q_BHTD: jax.Array, keys: tuple, segments: tuple, sinks_H: jax.Array | None
) -> jax.Array:
    """Runs a kernel on every row. keys: (k, v); segments: of (queries, keys)."""
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32)
    return jax.vmap(lambda q, k, v, *rows: run(q, k, v, splash.SegmentIds(*rows), sinks))(
        q_BHTD, *keys, *segments
    )


@dataclass(frozen=True)
class CutQueries:
    """The kernel for queries that are cut over the mesh axis `axis`, while every device has all
    keys, in order.

    places: [T], the place in its row of each query, the queries of the first device first.
    """

    axis: str
    devices: int
    places: tuple[int, ...]
    bounds: AttentionBounds

    @classmethod
    def of(
        cls,
        step: Step,
        dtype: DTypeLike,
        runtime: Runtime,
        axis: str,
        bounds: AttentionBounds,
        places: np.ndarray | None = None,
    ) -> CutQueries | None:
        """Returns None where no kernel serves the call. The tokens of a device have to fill its
        blocks."""
        assert runtime.layout is not None
        T = step.segments.shape[1]
        devices = runtime.layout.mesh.shape[axis]
        if (
            bounds.looks_ahead
            or T % (devices * LANES)
            or not served(
                replace(step, contiguous=step.contiguous or step.balanced), dtype, runtime
            )
        ):
            return None
        return cls(
            axis, devices, tuple(range(T)) if places is None else tuple(places.tolist()), bounds
        )

    def build(self, H: int, layout: Layout) -> tuple[Any, Any]:
        """Builds (the kernel for H heads of a device, its sharding specs): an argument of the
        function that `shard_map` runs."""
        kernel = _kernel(H, np.asarray(self.places, np.int32), self.devices, self.bounds)
        return kernel, kernel.manual_sharding_spec(
            jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec(None, self.axis))
        )

    def attend(
        self,
        kernel: Callable,
        q_bhtD: jax.Array,
        keys: tuple,
        segments: tuple,
        sinks_h: jax.Array | None,
    ) -> jax.Array:
        """Runs the kernel: [b, h, t, V]. Keys come in the order of the queries of all devices.

        segments: of the queries of this device, and of all keys.
        """
        order = np.argsort(np.asarray(self.places))
        if self.places != tuple(range(len(order))):
            keys = tuple(a[:, :, order] for a in keys)
            segments = (segments[0], segments[1][:, order])
        return _by_rows(kernel, q_bhtD, keys, segments, sinks_h)
