"""Grouped-query attention. B rows, T queries, C visible keys, H query heads, K key-value heads, G = H / K, D head dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.cache import LayerCache, Step, Visible, extend
from policy.config import Attention, DecoderConfig, Runtime
from policy.layers.norms import RMSNorm
from policy.layers.parameter import normal, weight, zeros
from policy.layers.rope import rotate

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class GroupedQueryAttention(nnx.Module):
    """Query head h reads key-value head h // G. Weights: q_proj [E, H, D], k_proj and v_proj [E, K, D], o_proj [H, D, E]."""

    def __init__(self, spec: Attention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, H, K, D = config.hidden_size, spec.heads, spec.kv_heads, spec.head_dim
        init = normal(config.initializer_range)
        self.q_proj = weight(rngs, (E, H, D), ("embed", "q_heads", "kv"), init)
        self.k_proj = weight(rngs, (E, K, D), ("embed", "kv_heads", "kv"), init)
        self.v_proj = weight(rngs, (E, K, D), ("embed", "kv_heads", "kv"), init)
        self.o_proj = weight(rngs, (H, D, E), ("heads", "kv", "embed"), init)
        if spec.bias:
            self.q_bias = weight(rngs, (H, D), ("q_heads", "kv"), zeros)
            self.k_bias = weight(rngs, (K, D), ("kv_heads", "kv"), zeros)
            self.v_bias = weight(rngs, (K, D), ("kv_heads", "kv"), zeros)
        if spec.out_bias:
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)
        if spec.qk_norm:
            self.q_norm = RMSNorm(D, spec.qk_norm, rngs)
            self.k_norm = RMSNorm(D, spec.qk_norm, rngs)

    def __call__(self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime):
        """Returns (x_BTE, cache)."""
        q, k, v = (self._project(x_BTE, name) for name in "qkv")
        if self.spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope:
            table = step.rotations[str(self.spec.rope)]
            q, k = rotate(q, self.spec.rope, table), rotate(k, self.spec.rope, table)
        q, k, v = (checkpoint_name(a, name) for a, name in ((q, "query_proj"), (k, "key_proj"), (v, "value_proj")))
        visible, cache = extend(cache, step, k=k, v=v)
        keys, values = visible.arrays["k"], visible.arrays["v"]
        out = attend(q * self.spec.scale, keys, values, Mask(step, visible, self.spec.window), runtime.attention_chunk)
        out = jnp.einsum("bhtd,hde->bte", out, self.o_proj[...].astype(x_BTE.dtype))
        if self.spec.out_bias:
            out = out + self.o_bias[...].astype(x_BTE.dtype)
        return checkpoint_name(out, "out_proj"), cache

    def _project(self, x_BTE: jax.Array, name: str) -> jax.Array:
        out = jnp.einsum("bte,ehd->bhtd", x_BTE, getattr(self, f"{name}_proj")[...].astype(x_BTE.dtype))
        if self.spec.bias:
            out = out + getattr(self, f"{name}_bias")[...].astype(x_BTE.dtype)[None, :, None]
        return out


class Mask:
    """Who may look at whom: same document, not padding, not the future, and at most `window` tokens back (itself counted)."""

    def __init__(self, step: Step, visible: Visible, window: int | None):
        self.queries = (step.positions, step.segments)
        self.keys = (visible.positions, visible.segments)
        self.window = window

    def of(self, positions_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """bool[B, T, C] for these queries."""
        k_positions, k_segments = (a[:, None, :] for a in self.keys)
        back = positions_BT[..., None] - k_positions
        allowed = (back >= 0) & (segments_BT[..., None] == k_segments) & (segments_BT[..., None] != 0)
        return allowed & (back < self.window) if self.window else allowed


def attend(q_BHTD: jax.Array, k_BKCD: jax.Array, v_BKCD: jax.Array, mask: Mask, chunk: int) -> jax.Array:
    """softmax(q k^T) v with the scale already in q; softmax in float32. Returns [B, H, T, Dv].

    More than `chunk` queries are taken in chunks whose scores are computed again in the backward pass, so that memory grows
    with T, not with T^2.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKCD.shape[1]
    q = q_BHTD.reshape(B, K, H // K, T, D)

    def some(q_BKGtD, positions_Bt, segments_Bt):
        if T == 1:
            # Keys on the left are read where they are; on the right XLA transposes them for every token on CPU.
            scores = jnp.einsum("bkcd,bkgtd->bkcgt", k_BKCD, q_BKGtD, preferred_element_type=jnp.float32)
            scores = jnp.moveaxis(scores, 2, -1)
        else:
            scores = jnp.einsum("bkgtd,bkcd->bkgtc", q_BKGtD, k_BKCD, preferred_element_type=jnp.float32)
        scores = jnp.where(mask.of(positions_Bt, segments_Bt)[:, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BKCD.dtype)
        return jnp.einsum("bkgtc,bkcd->bkgtd", weights, v_BKCD)

    if chunk >= T:
        out = some(q, *mask.queries)
    else:
        pad = -T % chunk
        parts = [
            jnp.pad(a, [(0, pad if i == axis else 0) for i in range(a.ndim)])
            for a, axis in zip((q, *mask.queries), (3, 1, 1), strict=True)
        ]
        stacked = [
            jnp.moveaxis(a.reshape(*a.shape[:axis], -1, chunk, *a.shape[axis + 1 :]), axis, 0)
            for a, axis in zip(parts, (3, 1, 1), strict=True)
        ]
        out = jax.lax.map(jax.checkpoint(lambda xs: some(*xs)), tuple(stacked))
        out = jnp.moveaxis(out, 0, 3).reshape(B, K, H // K, T + pad, -1)[:, :, :, :T]
    return out.reshape(B, H, T, v_BKCD.shape[-1])
