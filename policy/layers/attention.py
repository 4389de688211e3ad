"""Grouped-query attention. B rows, T queries, C visible keys, H query heads, K key-value heads, G = H / K, D head dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.cache import LayerCache, Step, Visible, extend
from policy.config import Attention, DecoderConfig, QueryTemperature, Runtime
from policy.intermediates import LayerAux
from policy.layers import flash_attention, paged_attention
from policy.layers.linear import linear
from policy.layers.norms import RMSNorm
from policy.layers.parameter import normal, weight, zeros
from policy.layers.rope import rotate

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class GroupedQueryAttention(nnx.Module):
    """Query head h reads key-value head h // G. Weights: q_proj [E, H, D] ([E, H, 2D] with a gate: per head query, then gate),
    k_proj and v_proj [E, K, D], o_proj [H, D, E]."""

    def __init__(self, spec: Attention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, H, K, D = config.hidden_size, spec.heads, spec.kv_heads, spec.head_dim
        init = normal(config.initializer_range)
        for name, heads, dim, axis in (("q", H, D * (1 + spec.gate), "q_heads"), ("k", K, D, "kv_heads"), ("v", K, D, "kv_heads")):
            if name == "v" and spec.values_are_keys:
                continue
            setattr(self, f"{name}_proj", weight(rngs, (E, heads, dim), ("embed", axis, "kv"), init, inputs=(0,)))
            if spec.bias:
                setattr(self, f"{name}_bias", weight(rngs, (heads, dim), (axis, "kv"), zeros))
        self.o_proj = weight(rngs, (H, D, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.out_bias:
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)
        if spec.qk_norm:
            together = spec.qk_norm_over == "all_heads"
            self.q_norm = RMSNorm(H * D if together else D, spec.qk_norm, rngs)
            self.k_norm = RMSNorm(K * D if together else D, spec.qk_norm, rngs)
        if spec.v_norm:
            self.v_norm = RMSNorm(D, spec.v_norm, rngs)
        if spec.sinks:
            self.sinks = weight(rngs, (H,), ("q_heads",), init)

    def __call__(self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime):
        """Returns (x_BTE, cache, LayerAux)."""
        spec = self.spec
        q, k = self._project(x_BTE, "q", runtime), self._project(x_BTE, "k", runtime)
        v = k if spec.values_are_keys else self._project(x_BTE, "v", runtime)
        q, gate = jnp.split(q, 2, axis=-1) if spec.gate else (q, None)
        q, k = self._place(q, k, step)
        if spec.v_norm:
            v = self.v_norm(v)
        if spec.temperature:
            q = (q * temperature(spec.temperature, step.positions)).astype(q.dtype)
        q, k, v = (checkpoint_name(a, name) for a, name in ((q, "query_proj"), (k, "key_proj"), (v, "value_proj")))
        visible, cache = extend(cache, step, k=k, v=v)
        keys, values = visible.arrays["k"], visible.arrays["v"]
        mask = Mask(step, visible, spec.window, spec.chunk)
        sinks = self.sinks[...] if spec.sinks else None
        out = paged_attention.decode(q * spec.scale, cache, step, spec, runtime)
        if out is None and spec.chunk is None:
            limits = {"window": spec.window, "softcap": spec.softcap, "sinks_H": sinks}
            out = flash_attention.attend(q * spec.scale, k, v, step, runtime, **limits)
        if out is None:
            out = attend(q * spec.scale, keys, values, mask, runtime.attention_chunk, spec.softcap, sinks)
        out = checkpoint_name(out, "context")
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = checkpoint_name(out, "attention_out")
        out = linear("bhtd,hde->bte", out, self.o_proj[...], runtime)
        if spec.out_bias:
            out = out + self.o_bias[...].astype(x_BTE.dtype)
        return checkpoint_name(out, "out_proj"), cache, LayerAux()

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        out = linear("bte,ehd->bhtd", x_BTE, getattr(self, f"{name}_proj")[...], runtime)
        if self.spec.bias:
            out = out + getattr(self, f"{name}_bias")[...].astype(x_BTE.dtype)[None, :, None]
        return out

    def _place(self, q_BHTD: jax.Array, k_BKTD: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Queries and keys normed and rotated, in the order that `qk_norm_over` says."""
        spec = self.spec

        def norm(q, k):
            if spec.qk_norm_over == "all_heads":
                return _over_all_heads(self.q_norm, q), _over_all_heads(self.k_norm, k)
            return self.q_norm(q), self.k_norm(k)

        q, k = q_BHTD, k_BKTD
        if spec.qk_norm and spec.qk_norm_over != "rotated_head":
            q, k = norm(q, k)
        if spec.rope:
            table = step.rotations[str(spec.rope)]
            q, k = rotate(q, spec.rope, table), rotate(k, spec.rope, table)
        if spec.qk_norm and spec.qk_norm_over == "rotated_head":
            q, k = norm(q, k)
        return q, k


def _over_all_heads(norm: RMSNorm, x_BHTD: jax.Array) -> jax.Array:
    B, H, T, D = x_BHTD.shape
    flat = norm(jnp.swapaxes(x_BHTD, 1, 2).reshape(B, T, H * D))
    return jnp.swapaxes(flat.reshape(B, T, H, D), 1, 2)


def temperature(spec: QueryTemperature, positions_BT: jax.Array) -> jax.Array:
    """float32[B, 1, T, 1]: what queries at these positions are multiplied by (arXiv 2501.19399)."""
    steps = jnp.floor((positions_BT.astype(jnp.float32) + 1.0) / spec.floor)
    return (1.0 + spec.scale * jnp.log1p(steps))[:, None, :, None]


class Mask:
    """Who may look at whom: same document, not padding, not the future, at most `window` tokens back (itself counted), and in the
    same `chunk` of positions."""

    def __init__(self, step: Step, visible: Visible, window: int | None = None, chunk: int | None = None):
        self.queries = (step.positions, step.segments)
        self.keys = (visible.positions, visible.segments)
        self.window, self.chunk = window, chunk

    def of(self, positions_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """bool[B, T, C] for these queries; takes what `queries` holds, cut along T."""
        k_positions, k_segments = (a[:, None, :] for a in self.keys)
        positions, segments = positions_BT[..., None], segments_BT[..., None]
        back = positions - k_positions
        allowed = (back >= 0) & (segments == k_segments) & (segments != 0)
        if self.window:
            allowed &= back < self.window
        if self.chunk:
            allowed &= positions // self.chunk == k_positions // self.chunk
        return allowed


def attend(
    q_BHTD: jax.Array,
    k_BKCD: jax.Array,
    v_BKCD: jax.Array,
    mask: Mask,
    chunk: int,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T) v with the scale already in q; softmax in float32. Returns [B, H, T, Dv].

    `softcap` c bounds the scores by c tanh(s / c), before the mask; `sinks` are one more score of each head, without a value.
    More than `chunk` queries are taken in chunks whose scores are computed again in the backward pass, so that memory grows
    with T, not with T^2.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKCD.shape[1]
    q = q_BHTD.reshape(B, K, H // K, T, D)
    sinks = None if sinks_H is None else sinks_H.reshape(K, H // K, 1, 1)

    def some(q_BKGtD, *queries):
        if T == 1:
            # Keys on the left are read where they are; on the right XLA transposes them for every token on CPU.
            scores = jnp.einsum("bkcd,bkgtd->bkcgt", k_BKCD, q_BKGtD, preferred_element_type=jnp.float32)
            scores = jnp.moveaxis(scores, 2, -1)
        else:
            scores = jnp.einsum("bkgtd,bkcd->bkgtc", q_BKGtD, k_BKCD, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(mask.of(*queries)[:, None, None], scores, MASKED)
        weights = _softmax(scores, sinks).astype(v_BKCD.dtype)
        return jnp.einsum("bkgtc,bkcd->bkgtd", weights, v_BKCD)

    if chunk >= T:
        out = some(q, *mask.queries)
    else:
        parts = (in_chunks(a, chunk, axis) for a, axis in ((q, 3), *((a, 1) for a in mask.queries)))
        out = jax.lax.map(jax.checkpoint(lambda xs: some(*xs)), tuple(parts))
        out = of_chunks(out, 3)[:, :, :, :T]
    return out.reshape(B, H, T, v_BKCD.shape[-1])


def in_chunks(a: jax.Array, chunk: int, axis: int) -> jax.Array:
    """`axis` padded to whole chunks and cut into them; the chunks come first."""
    a = jnp.pad(a, [(0, -a.shape[axis] % chunk if i == axis else 0) for i in range(a.ndim)])
    return jnp.moveaxis(a.reshape(*a.shape[:axis], -1, chunk, *a.shape[axis + 1 :]), axis, 0)


def of_chunks(a: jax.Array, axis: int) -> jax.Array:
    """The inverse of `in_chunks`, with the padding still there."""
    a = jnp.moveaxis(a, 0, axis)
    return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the last axis; `sinks` take their share of the sum."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
    e = jnp.exp(scores - top)
    return e / (jnp.sum(e, axis=-1, keepdims=True) + jnp.exp(sinks - top))
