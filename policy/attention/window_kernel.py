"""A TPU kernel for attention of one new token per row over the window that it sees of a paged cache.

policy/attention/paged_attention.py chooses it, for layers whose queries look back a limited number of tokens. The
portable form, which copies the pages of the window first, is its oracle (policy/attention/dot_product_attention.py).

B rows, H query heads, K key-value heads, G = H / K, D head dimension, N pages, P tokens of a page, M pages of a row.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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

    table: the pages that hold them. bounds: int32, the first entry that row b sees and the one after its last, counted
    from the start of table[b]; it sees one at least. block: pages that are worked on at a time.

    One program per row and key-value head reads its pages in blocks and holds the softmax so far as (maximum, sum,
    output). It fetches the next block, which may be the first of the next program, meanwhile. Pages without a visible
    entry are not read.
    """
    B, H, D = q_BHD.shape
    K, _, P, _ = k_KNPD.shape
    G = H // K
    rows = -(-G // SUBLANES) * SUBLANES
    q_BKGD = jnp.pad(q_BHD.reshape(B, K, G, D), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    of_program = pl.BlockSpec((None, None, rows, D), lambda i, *_: (i // K, i % K, 0, 0))
    pool = pl.BlockSpec(memory_space=pl.ANY)
    out_BKGD = pl.pallas_call(
        partial(_kernel, width=table_BM.shape[1], heads=K, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * K,),
            in_specs=[of_program, pool, pool],
            out_specs=of_program,
            scratch_shapes=[
                *(pltpu.VMEM((2, block, P, D), pages.dtype) for pages in (k_KNPD, v_KNPD)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        out_shape=jax.ShapeDtypeStruct((B, K, rows, D), q_BHD.dtype),
        interpret=interpret,
        name=NAME,
    )(bounds_B2.reshape(-1), table_BM.reshape(-1), q_BKGD, k_KNPD, v_KNPD)
    return out_BKGD[:, :, :G].reshape(B, H, D)


def _kernel(bounds, table, q, k_pool, v_pool, out, k_buffer, v_buffer, turn, arrived, *, width, heads, softcap):
    """Computes one key-value head of one row. `turn`: the half of the buffers that holds the next block, carried from
    program to program."""
    i, (_, block, P, D) = pl.program_id(0), k_buffer.shape
    tokens = block * P

    def each_page(program, number, half, do):
        """Calls `do` with the copies of each page of a block that holds visible entries."""
        row, head = program // heads, program % heads
        for j in range(block):
            page = number * block + j

            @pl.when((page * P < bounds[2 * row + 1]) & ((page + 1) * P > bounds[2 * row]))
            def _(j=j, page=page):
                for pool, buffer in ((k_pool, k_buffer), (v_pool, v_buffer)):
                    source = pool.at[head, table[row * width + page]]
                    do(pltpu.make_async_copy(source, buffer.at[half, j], arrived.at[half]))

    def start(program, number, half):
        each_page(program, number, half, lambda copy: copy.start())

    @pl.when(i == 0)
    def _():
        turn[0] = 0
        for buffer in (k_buffer, v_buffer):
            buffer[...] = jnp.zeros_like(buffer)  # entries with weight 0 must be numbers
        start(0, 0, 0)

    first, end, before = bounds[2 * (i // heads)], bounds[2 * (i // heads) + 1], turn[0]
    blocks = pl.cdiv(end, tokens)

    def work(number, carry):
        top, total, sum_GD = carry
        half, last = (before + number) % 2, number + 1 == blocks

        @pl.when(jnp.logical_not(last) | (i + 1 < pl.num_programs(0)))
        def _():
            start(jnp.where(last, i + 1, i), jnp.where(last, 0, number + 1), 1 - half)

        each_page(i, number, half, lambda copy: copy.wait())
        keys, values = (buffer[half].reshape(tokens, D) for buffer in (k_buffer, v_buffer))
        queries = q[...].astype(keys.dtype)
        scores = jax.lax.dot_general(queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        entry = number * tokens + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        visible = (entry >= first) & (entry < end)
        higher = jnp.maximum(top, jnp.max(jnp.where(visible, scores, MASKED), axis=1, keepdims=True))
        shrink, weights = jnp.exp(top - higher), jnp.where(visible, jnp.exp(scores - higher), 0.0)
        seen = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return higher, shrink * total + jnp.sum(weights, axis=1, keepdims=True), shrink * sum_GD + seen

    G = q.shape[0]
    nothing = jnp.full((G, 1), MASKED, jnp.float32), jnp.zeros((G, 1), jnp.float32), jnp.zeros((G, D), jnp.float32)
    _, total, sum_GD = jax.lax.fori_loop(0, blocks, work, nothing)
    turn[0] = (before + blocks) % 2
    out[...] = (sum_GD / total).astype(out.dtype)
