"""Attention of whole sequences by a kernel that keeps no scores: on TPU, jax's splash attention. Where it cannot serve, `attend`
returns None, and the portable form (policy/layers/attention.py) is used: it is the kernel's oracle.

It is for calls that look at their own tokens only (`Step.whole`): training, scoring, and the first tokens of a prompt.

B rows, T tokens, H query heads, K key-value heads, D dimension of queries and keys, V that of values.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from policy.cache import Step
from policy.config import Runtime
from policy.sharding import Layout

LANES = 128
# Queries and keys of a block.
BLOCK = 512
# Fewer tokens have no scores worth a kernel.
FEWEST = 128


def served(step: Step, dtype, runtime: Runtime) -> bool:
    """Whether there is a kernel for a call over its own tokens, if their heads are cut alike."""
    # Float32 means products at the highest precision, which the kernel does not have.
    here = runtime.layout is not None and runtime.layout.platform == "tpu" and dtype == jnp.bfloat16
    return here and step.whole and step.segments.shape[1] >= FEWEST


def attend(
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTV: jax.Array,
    step: Step,
    runtime: Runtime,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array | None:
    """softmax(q k^T) v, [B, H, T, V], the scale already in q; `window`, `softcap` and `sinks` as in the portable form. The output
    and the logarithm of the sum of each softmax have the name "context" for rematerialisation. None: no kernel for this."""
    if not served(step, q_BHTD.dtype, runtime):
        return None
    layout = runtime.layout
    kernel = partial(splash_attention, window=window, softcap=softcap)
    if layout.mesh.size == 1:
        return kernel(q_BHTD, k_BKTD, v_BKTV, step.segments, sinks_H)
    return _on_mesh(kernel, layout, q_BHTD, k_BKTD, v_BKTV, step.segments, sinks_H)


def _on_mesh(kernel, layout: Layout, q_BHTD, k_BKTD, v_BKTV, segments_BT, sinks_H) -> jax.Array | None:
    """Every device on its own rows and heads. None where the mesh cuts query heads otherwise than key-value heads."""
    q_spec = layout.spec(("batch", "heads", None, None), q_BHTD.shape)
    k_spec = layout.spec(("batch", "kv_heads", None, None), k_BKTD.shape)
    if q_spec != k_spec:
        return None
    specs = (q_spec, k_spec, k_spec, layout.spec(("batch", None), segments_BT.shape))
    arguments = (q_BHTD, k_BKTD, v_BKTV, segments_BT)
    if sinks_H is None:
        kernel = partial(kernel, sinks_H=None)
    else:
        arguments, specs = (*arguments, sinks_H), (*specs, jax.sharding.PartitionSpec(q_spec[1]))
    return jax.shard_map(kernel, mesh=layout.mesh, in_specs=specs, out_specs=q_spec, check_vma=False)(*arguments)


def splash_attention(q_BHTD, k_BKTD, v_BKTV, segments_BT, sinks_H, *, window=None, softcap=None, interpret=False) -> jax.Array:
    """The kernel on one device. T is padded to whole blocks, of segment 0."""
    H, T = q_BHTD.shape[1:3]
    filling = -T % LANES
    q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, filling), (0, 0))) for a in (q_BHTD, k_BKTD, v_BKTV))
    segments = jnp.pad(segments_BT, ((0, 0), (0, filling)))
    shape = (T + filling, T + filling)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if shape[0] % size == 0)
    run = splash.make_splash_mha_single_device(
        mask=masks.MultiHeadMask([mask] * H),
        block_sizes=splash.BlockSizes(block, block, block, block, block, block, block, block),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="context",
        interpret=interpret,
    )
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32)
    out = jax.vmap(lambda q, k, v, row: run(q, k, v, splash.SegmentIds(row, row), sinks))(q, k, v, segments)
    return out[:, :, :T]
