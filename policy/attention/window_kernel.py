"""A TPU kernel for attention of one new token per row over the window that it sees of a paged
cache.

policy/attention/paged_attention.py chooses it, for layers whose queries look back a limited number
of tokens. The dense form, which copies the pages of the window first, is its oracle
(policy/attention/dot_product_attention.py).

B rows, H query heads, K key-value heads, G = H / K, D head dimension, N pages, P tokens of a page,
M pages of a row.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from policy.ops.page_blocks import OnlineSoftmax, PageBlocks, scratch_shapes

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
# Name of the kernel in compiled programs.
NAME = "window_paged_attention"
# A block of queries has full tiles of bfloat16 numbers: 16 rows.
SUBLANES = 16


def attend(
    q_BHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    table_BM: jax.Array,
    bounds_B2: jax.Array,
    *,
    block: int,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax(q k^T) v over some entries of each row, the scale already in q: [B, H, D].

    table: the pages that hold them. bounds: int32, the first entry that row b sees and the one
    after its last, counted from the start of table[b]; it sees one at least. block: pages that are
    worked on at a time.

    One program per row and key-value head reads its pages in blocks and holds the softmax so far as
    (maximum, sum, output). Pages without a visible entry are not read.
    """
    B, H, D = q_BHD.shape
    K = len(k_KNPD)
    G = H // K
    rows = -(-G // SUBLANES) * SUBLANES
    q_BKGD = jnp.pad(q_BHD.reshape(B, K, G, D), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    of_program = pl.BlockSpec((None, None, rows, D), lambda i, *_: (i // K, i % K, 0, 0))
    pool = pl.BlockSpec(memory_space=pl.ANY)
    out_BKGD = pl.pallas_call(
        partial(_kernel, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * K,),
            in_specs=[of_program, pool, pool],
            out_specs=of_program,
            scratch_shapes=scratch_shapes(block, k_KNPD, v_KNPD),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        out_shape=jax.ShapeDtypeStruct((B, K, rows, D), q_BHD.dtype),
        interpret=interpret,
        name=NAME,
    )(bounds_B2.reshape(-1), table_BM.reshape(-1), q_BKGD, k_KNPD, v_KNPD)
    return out_BKGD[:, :, :G].reshape(B, H, D)


def _kernel(bounds, table, q, *refs, softcap):
    """Computes one key-value head of one row."""
    k_pool, v_pool, out, *scratch = refs
    P = k_pool.shape[2]

    def is_seen(row, page):
        return (page * P < bounds[2 * row + 1]) & ((page + 1) * P > bounds[2 * row])

    blocks = PageBlocks(table, (k_pool, v_pool), scratch, is_seen)
    row, _ = blocks.row_and_head(pl.program_id(0))
    first = bounds[2 * row]
    end = bounds[2 * row + 1]

    def work(start, carry, keys, values):
        top, total, sum_GD = carry
        queries = q[...].astype(keys.dtype)
        scores = jax.lax.dot_general(
            queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        entry = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        visible = (entry >= first) & (entry < end)
        higher = jnp.maximum(
            top, jnp.max(jnp.where(visible, scores, MASKED), axis=1, keepdims=True)
        )
        shrink = jnp.exp(top - higher)
        weights = jnp.where(visible, jnp.exp(scores - higher), 0.0)
        seen = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return OnlineSoftmax(
            higher,
            shrink * total + jnp.sum(weights, axis=1, keepdims=True),
            shrink * sum_GD + seen,
        )

    G, D = q.shape
    nothing = OnlineSoftmax(
        jnp.full((G, 1), MASKED, jnp.float32),
        jnp.zeros((G, 1), jnp.float32),
        jnp.zeros((G, D), jnp.float32),
    )
    softmax = blocks.fold(end, work, nothing)
    out[...] = (softmax.values / softmax.total).astype(out.dtype)
