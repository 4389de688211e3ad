"""Attention of one new token per row over a paged cache, by kernels that read the pages in place.

Where no kernel can compute a call, `decode` and `decode_latent` return None, and the caller uses
the dense form over copied pages (policy/attention/dot_product_attention.py), which is the kernels'
oracle.

The platform is the platform of the program's devices. A program may be compiled on a machine
without such devices.

B rows, T tokens, H query heads, K key-value heads, D and V dimensions of keys and values, R repeats
of a stack, N pages, P tokens of a page, M pages of a row, L latent dimension.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.sharding import PartitionSpec

from policy.attention import gpu_attention, window_kernel
from policy.attention.window_kernel import MASKED
from policy.cache import pages
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import Attention, LatentAttention, Runtime
from policy.mesh.sharding import Layout
from policy.ops.page_blocks import OnlineSoftmax, PageBlocks, scratch_shapes

# Tokens that a kernel works on at a time: 512 keys and values of 128 numbers in bfloat16 are 256
# KiB of VMEM, twice for the next.
BLOCK_TOKENS = 512
# Names of the kernels in compiled programs, and the entries of the cache that they read.
KERNELS = {
    "paged_attention": ("k", "v"),
    "latent_paged_attention": ("latent",),
    window_kernel.NAME: ("k", "v"),
}


def decode(
    q_BHTD: jax.Array, cache: LayerCache | None, step: Step, spec: Attention, runtime: Runtime
) -> jax.Array | None:
    """Computes softmax(q k^T) v over the cache, with the scale already in q: [B, H, 1, D].

    None: no kernel serves the call.
    """
    if spec.sinks or cache is None or not _served(q_BHTD, cache, "k", step, runtime):
        return None
    assert runtime.layout is not None, "a served call has a layout"
    # The kernels round their inputs to bfloat16.
    if _pool(cache, "k").dtype != jnp.bfloat16:
        return None
    lookback = spec.lookback
    if runtime.layout.platform == "gpu" and lookback is None:
        kernel = partial(gpu_attention.attend_pages, softcap=spec.softcap)
    elif runtime.layout.platform == "tpu" and spec.head_dim % pages.LANES == 0:
        kernel = partial(_keys_and_values if lookback is None else _window, softcap=spec.softcap)
    else:
        return None
    seen = _lengths(step)
    if lookback is not None:
        cache, seen = _seen_through_window(cache, seen, spec)
    return _over_pages(kernel, q_BHTD, cache, ("k", "v"), seen, runtime.layout)


def _seen_through_window(
    cache: LayerCache, lengths_B: jax.Array, spec: Attention
) -> tuple[LayerCache, jax.Array]:
    """Returns (the cache with the pages alone that the tokens of a step see, the bounds of the
    entries that they see of these pages, int32[B, 2])."""
    assert cache.table is not None and spec.lookback is not None
    size = _pool(cache, "k").shape[3]
    last = lengths_B - 1
    first = last - last % spec.chunk if spec.chunk else jnp.zeros_like(last)
    first = jnp.maximum(first, last - spec.window + 1) if spec.window else first
    step = Step(positions=last[:, None], segments=jnp.ones_like(last)[:, None])
    table, start = pages.visible_table(cache.table, step, spec.lookback, size)
    bounds = jnp.stack([first, lengths_B], axis=1) - start
    return replace(cache, table=table), bounds


def _window(q_BHD, k_KNPD, v_KNPD, table_BM, bounds_B2, softcap: float | None) -> jax.Array:
    block = _pages_of_block(k_KNPD.shape[2], table_BM.shape[1])
    return window_kernel.attend(
        q_BHD, k_KNPD, v_KNPD, table_BM, bounds_B2, block=block, softcap=softcap
    )


def _keys_and_values(
    q_BHD, k_KNPD, v_KNPD, table_BM, lengths_B, softcap: float | None
) -> jax.Array:
    block = _pages_of_block(k_KNPD.shape[2], table_BM.shape[1])
    table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % block)))
    return paged_attention(
        q_BHD,
        k_KNPD,
        v_KNPD,
        lengths_B,
        table_BM,
        pages_per_compute_block=block,
        attn_logits_soft_cap=softcap,
    )


def decode_latent(
    q_BHTL: jax.Array, cache: LayerCache, step: Step, spec: LatentAttention, runtime: Runtime
) -> jax.Array | None:
    """Computes the same over "latent" entries: [B, H, 1, kv_lora_rank]. None: no kernel serves the
    call.

    A latent is the key of all heads, and its first `kv_lora_rank` numbers are the value. Calls with
    an indexer are left to the dense form.
    """
    rank = spec.kv_lora_rank
    if (
        spec.indexer is not None
        or rank % pages.LANES
        or not _served(q_BHTL, cache, "latent", step, runtime)
    ):
        return None
    filling = pages.padded_dim(q_BHTL.shape[-1]) - q_BHTL.shape[-1]
    q_BHTL = jnp.pad(q_BHTL, [(0, 0)] * 3 + [(0, filling)])
    assert runtime.layout is not None, "a served call has a layout"
    return _over_pages(
        partial(latent_kernel, rank=rank),
        q_BHTL,
        cache,
        ("latent",),
        _lengths(step),
        runtime.layout,
    )


def _served(
    q: jax.Array, cache: LayerCache | None, name: str, step: Step, runtime: Runtime
) -> bool:
    if (
        cache is None
        or cache.table is None
        or step.positions.shape[1] != 1
        or runtime.layout is None
    ):
        return False
    if not isinstance(cache.arrays[name], pages.Pool):  # a sliding window of entries
        return False
    pool = _pool(cache, name)
    platform = runtime.layout.platform
    floats = f"{name}.scale" not in cache.arrays and pool.dtype in (jnp.float32, jnp.bfloat16)
    if platform == "tpu":
        here = (
            pool.shape[3] % (32 // pool.dtype.itemsize) == 0
        )  # rows of a tile in memory: a page must be full tiles
    else:
        here = (
            platform == "gpu"
            and name == "k"
            and gpu_attention.supports_pages(q.shape[-1], pool.shape[3])
        )
    # The kernel of a device reads its own pages only.
    own_pages = not (cache.anywhere and runtime.layout.spec(pages.AXES, pool.shape)[2])
    return here and floats and own_pages and _same_shards(q.shape, pool.shape, runtime.layout)


def _pool(cache: LayerCache, name: str) -> jax.Array:
    """Returns the array of a pool, [K, R, N, P, D]."""
    return cast(pages.Pool, cache.arrays[name]).array


def _same_shards(queries: tuple[int, ...], pool: tuple[int, ...], layout: Layout) -> bool:
    """Tells whether queries are cut over the devices as the pool is: rows as its pages, and heads
    as its heads.

    A pool with one head serves all query heads.
    """
    rows, heads, *_ = layout.spec((*_places(layout), None, None), queries)
    kv_heads, _, here, *_ = layout.spec(pages.AXES, pool)
    return rows == here and (pool[0] == 1 or heads == kv_heads)


def _places(layout: Layout) -> tuple[str, str]:
    """Returns the logical axes of the rows and heads of queries."""
    return ("cache_batch", "cache_heads") if layout.cache_rows_differ else ("batch", "heads")


def _pages_of_block(size: int, width: int) -> int:
    return max(1, min(BLOCK_TOKENS // size, width))


def _lengths(step: Step) -> jax.Array:
    """Returns the entries that the token of each row sees without a window, int32[B].

    A kernel must look at one entry at least. The result of a row that is not active is not used.
    """
    return jnp.where(step.segments[:, 0] != 0, step.positions[:, 0] + 1, 1).astype(jnp.int32)


def _over_pages(
    kernel,
    q_BHTD: jax.Array,
    cache: LayerCache,
    names: tuple[str, ...],
    seen: jax.Array,
    layout: Layout,
) -> jax.Array:
    """Runs `kernel(q [B, H, D], pools [K, R N, P, D], table, seen)` on every device with its own
    rows, heads and pages. seen: lengths or bounds of the rows."""
    pools = [_pool(cache, name) for name in names]

    def local(q, layer, table, seen, *pools):
        K, R, N, P, D = pools[0].shape
        flat = (pool.reshape(pool.shape[0], R * N, P, pool.shape[-1]) for pool in pools)
        return kernel(q[:, :, 0], *flat, table % N + layer * N, seen)[:, :, None]

    arguments = (q_BHTD, jnp.int32(cache.index), cache.table, seen, *pools)
    if layout.mesh.size == 1:
        return local(*arguments)
    q_spec = layout.spec((*_places(layout), None, None), q_BHTD.shape)
    rows = PartitionSpec(q_spec[0])
    pool_spec = layout.spec(pages.AXES, pools[0].shape)
    specs = (q_spec, PartitionSpec(), rows, rows, *[pool_spec] * len(pools))
    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=specs, out_specs=q_spec, check_vma=False
    )(*arguments)


def latent_kernel(
    q_BHL: jax.Array,
    pool_1NPL: jax.Array,
    table_BM: jax.Array,
    lengths_B: jax.Array,
    *,
    rank: int,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax(q k^T) k[:, :rank] over the first lengths[b] >= 1 entries of the pages
    table[b]: [B, H, rank].

    One program per row reads its pages in blocks and holds the softmax so far as (maximum, sum,
    output). A page that holds entries is read once for all heads.
    """
    B, H, L = q_BHL.shape
    block = _pages_of_block(pool_1NPL.shape[2], table_BM.shape[1])
    table = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % block)))
    return pl.pallas_call(
        _latent_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B,),
            in_specs=[
                pl.BlockSpec((None, H, L), lambda b, *_: (b, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, H, rank), lambda b, *_: (b, 0, 0)),
            scratch_shapes=scratch_shapes(block, pool_1NPL),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        out_shape=jax.ShapeDtypeStruct((B, H, rank), q_BHL.dtype),
        interpret=interpret,
        name="latent_paged_attention",
    )(lengths_B, table.reshape(-1), q_BHL, pool_1NPL)


def _latent_kernel(lengths, table, q, pool, out, *scratch):
    """Computes the attention of row `program_id(0)`, page block by page block, for all its
    heads."""
    b = pl.program_id(0)
    P = pool.shape[2]
    H, rank = out.shape
    blocks = PageBlocks(table, (pool,), scratch, lambda row, page: page * P < lengths[row])

    def work(start, carry, keys):
        top, total, sum_HV = carry
        scores = jax.lax.dot_general(
            q[...], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        column = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(column < lengths[b], scores, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(top - higher)
        weights = jnp.exp(scores - higher)
        seen = jnp.dot(
            weights.astype(keys.dtype), keys[:, :rank], preferred_element_type=jnp.float32
        )
        return OnlineSoftmax(
            higher,
            shrink * total + jnp.sum(weights, axis=1, keepdims=True),
            shrink * sum_HV + seen,
        )

    nothing = OnlineSoftmax(
        jnp.full((H, 1), MASKED, jnp.float32),
        jnp.zeros((H, 1), jnp.float32),
        jnp.zeros((H, rank), jnp.float32),
    )
    softmax = blocks.fold(lengths[b], work, nothing)
    out[...] = (softmax.values / softmax.total).astype(out.dtype)
