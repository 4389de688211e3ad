"""Attention kernels for NVIDIA GPUs: jax's own, written in Pallas and compiled by Triton, loaded
where they are used. policy/attention/flash_attention.py and policy/attention/paged_attention.py
choose them. The dense form is their oracle.

B rows, T tokens, H query heads, K key-value heads, G = H / K, D head dimension, N pages, P tokens
of a page, M pages of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Queries and keys of a block, in the forward and in the backward pass.
FORWARD = 128
BACKWARD = 32
# Triton multiplies blocks of 16 x 16 at least. With a head of more numbers a block of 128 queries
# and its keys do not fit a multiprocessor of 100 KiB.
SMALLEST = 16
LARGEST_HEAD = 128
# Keys that a decoding kernel works on at a time, and the largest number of programs that share the
# pages of a row.
BLOCK_KEYS = 128
SPLITS = 16


def supports_heads(keys: int, values: int) -> bool:
    """Tells whether `flash_attention` serves heads with keys and values of these dimensions."""
    return keys == values and SMALLEST <= keys <= LARGEST_HEAD


def flash_attention(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTD: jax.Array,
    segments_BT: jax.Array,
    sinks_H: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes causal attention within segments, the scale already in q: [B, H, T, D].

    T is padded to full blocks, of segment 0. Query heads that share keys read the same keys. There
    is no kernel with sinks: `sinks` must be None.
    """
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    assert sinks_H is None
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    filling = -T % FORWARD

    def by_token(a):
        return jnp.swapaxes(jnp.pad(a, ((0, 0), (0, 0), (0, filling), (0, 0))), 1, 2)

    blocks = BlockSizes(FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD, BACKWARD)
    segments = jnp.pad(segments_BT, ((0, 0), (0, filling)))
    k, v = by_token(k_BKTD), by_token(v_BKTD)

    def of_group(q_BTKD):
        return mha(q_BTKD, k, v, segments, 1.0, True, blocks, interpret=interpret)

    q = by_token(q_BHTD).reshape(B, T + filling, K, H // K, D)
    out = jax.vmap(of_group, in_axes=3, out_axes=3)(q).reshape(B, T + filling, H, D)
    return jnp.swapaxes(out, 1, 2)[:, :, :T]


def supports_pages(head_dim: int, page_size: int) -> bool:
    """Tells whether `attend_pages` serves heads and pages of these sizes."""
    return all(size >= SMALLEST and size & (size - 1) == 0 for size in (head_dim, page_size))


def attend_pages(
    q_BHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    table_BM: jax.Array,
    lengths_B: jax.Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends to the first lengths[b] >= 1 entries of the pages table[b], the scale already in q:
    [B, H, D]."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    M = table_BM.shape[1]
    block = max(1, BLOCK_KEYS // k_KNPD.shape[2])
    splits = min(SPLITS, -(-M // block))
    table = jnp.pad(table_BM, ((0, 0), (0, -M % (splits * block))))
    return paged_attention(
        q_BHD,
        k_KNPD,
        v_KNPD,
        table,
        lengths_B,
        pages_per_compute_block=block,
        k_splits=splits,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
