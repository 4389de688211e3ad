"""Grouped-query attention.

B rows, T queries, C visible keys, E hidden, H query heads, K key-value heads, G = H / K, D head
dimension.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention import block_attention, flash_attention, paged_attention
from policy.attention.attention_plan import Keys
from policy.attention.compressed.block_indexer import BlockKeyIndexer, BlockMask, attend_blocks
from policy.attention.context_parallel import applies, attend_cut
from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
from policy.attention.indexer import with_auto_axes
from policy.cache.layer_cache import LayerCache, LayerOutput, Visible, extend, row_layout, visible
from policy.cache.step import Step
from policy.config import Attention, DecoderConfig, QueryTemperature, Runtime
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode
from policy.mesh.sharding import constrain, decoded, from_cache, to_cache
from policy.ops.linear import linear
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight, zeros
from policy.ops.rope import rotate


class GroupedQueryAttention(nnx.Module):
    """Computes grouped-query attention: query head h reads key-value head h // G.

    Weights: q_proj [E, H, D] ([E, H, 2D] with a gate: per head query, then gate), k_proj and v_proj
    [E, K, D], o_proj [H, D, E]. A layer that shares keys and values has no k_proj, v_proj and
    k_norm.
    """

    def __init__(self, spec: Attention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        H = spec.heads
        K = spec.kv_heads
        D = spec.head_dim
        init = normal(config.initializer_range)
        for name, heads, dim, axis in (
            ("q", H, D * (1 + spec.gate), "q_heads"),
            ("k", K, D, "kv_heads"),
            ("v", K, D, "kv_heads"),
        ):
            if (name == "v" and spec.values_are_keys) or (name != "q" and spec.shares):
                continue
            setattr(
                self,
                f"{name}_proj",
                weight(rngs, (E, heads, dim), ("embed", axis, "kv"), init, inputs=(0,)),
            )
            if spec.bias:
                setattr(self, f"{name}_bias", weight(rngs, (heads, dim), (axis, "kv"), zeros))
        self.o_proj = weight(rngs, (H, D, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.out_bias:
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)
        if spec.qk_norm:
            together = spec.qk_norm_over == "all_heads"
            self.q_norm = RMSNorm(H * D if together else D, spec.qk_norm, rngs)
            if not spec.shares:
                self.k_norm = RMSNorm(K * D if together else D, spec.qk_norm, rngs)
        if spec.v_norm and not spec.shares:
            self.v_norm = RMSNorm(D, spec.v_norm, rngs)
        if spec.sinks:
            self.sinks = weight(rngs, (H,), ("q_heads",), init)
        if spec.indexer is not None:
            self.indexer = BlockKeyIndexer(spec.indexer, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Returns what attention adds to x_BTE [B, T, E], the cache with the entries of these
        tokens, and the values that the layer reports."""
        if self.spec.indexer is not None and in_explicit_mode():
            return with_auto_axes(self, x_BTE, step, runtime)
        spec = self.spec
        shares = self.spec.shares
        own = shares is None
        q = self._project(x_BTE, "q", step, runtime)
        k = self._project(x_BTE, "k", step, runtime) if own else None
        v = k if spec.values_are_keys or not own else self._project(x_BTE, "v", step, runtime)
        q, gate = jnp.split(q, 2, axis=-1) if spec.gate else (q, None)
        q, k = self._norm_and_rotate(q, k, step)
        if spec.v_norm and v is not None:
            v = self.v_norm(v)
        if spec.temperature:
            q = (q * temperature(spec.temperature, step.positions)).astype(q.dtype)
        named = {"query_proj": q, "key_proj": k, "value_proj": v}
        parts = [None if a is None else checkpoint_name(a, name) for name, a in named.items()]
        layout = row_layout(cache, runtime.layout)
        q, k, v = cast(Any, [None if a is None else to_cache(a, layout) for a in parts])
        index_queries = None
        index_keys = {}
        if spec.indexer is not None:
            index_queries, raw_keys = self.indexer(x_BTE, step)
            index_keys = {"index": to_cache(raw_keys, layout)}
        if shares is None:
            seen, cache = extend(cache, step, lookback=spec.lookback, k=k, v=v, **index_keys)
            entries = cache
        else:
            k, v, entries = step.keys(shares)
            seen = visible(entries, step, lookback=spec.lookback, k=k, v=v)
        if index_queries is not None and self._selects(step, seen):
            out = self._over_blocks(q * spec.scale, index_queries, seen, entries, step, runtime)
        else:
            out = self._over_all(q * spec.scale, (k, v), seen, entries, step, runtime)
        out = from_cache(out, runtime.layout)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = checkpoint_name(out, "attention_out")
        out = linear("bhtd,hde->bte", out, self.o_proj[...], runtime)
        if spec.out_bias:
            out = out + self.o_bias[...].astype(x_BTE.dtype)
        aux = LayerAux() if spec.keeps is None else LayerAux(kept={spec.keeps: (k, v)})
        return LayerOutput(checkpoint_name(out, "out_proj"), cache, aux)

    def _over_all(
        self,
        q_BHTD: jax.Array,
        own: tuple,
        seen: Visible,
        entries: LayerCache | None,
        step: Step,
        runtime: Runtime,
    ) -> jax.Array:
        """Attends to all visible keys, [B, H, T, D]. `own`: the keys and values of this call. The
        result has the name "context", which the kernels give it themselves."""
        spec = self.spec
        k, v = own
        sinks = self.sinks[...] if spec.sinks else None
        bounds = AttentionBounds(
            spec.window, spec.chunk, spec.softcap, spec.looks_ahead and step.until is not None
        )
        out = paged_attention.decode(q_BHTD, entries, step, spec, runtime)
        if applies(entries, step, runtime):
            out = attend_cut(q_BHTD, Keys((k, v)), step, runtime, bounds, sinks)
        elif out is None:
            own_names = flash_attention.attend(q_BHTD, k, v, step, runtime, bounds, sinks)
            if own_names is None and entries is None:
                own_names = block_attention.attend(q_BHTD, k, v, step, runtime, bounds, sinks)
            if own_names is not None:
                return own_names
        if out is None:
            mask = Mask(step, seen, spec.window, spec.chunk, spec.looks_ahead)
            keys = seen.arrays["k"]
            values = seen.arrays["v"]
            out = attend(
                q_BHTD,
                keys,
                values,
                mask,
                runtime.attention_chunk,
                spec.softcap,
                sinks,
                has_transposed_keys=seen.has_transposed_keys,
            )
        return checkpoint_name(out, "context")

    def _selects(self, step: Step, seen: Visible) -> bool:
        """Tells whether a query may see fewer than all keys before it."""
        assert self.spec.indexer is not None
        length = step.positions.shape[1] if step.contiguous else seen.positions.shape[1]
        return BlockMask.selects(self.spec.indexer, length)

    def _over_blocks(
        self,
        q_BHTD: jax.Array,
        index_queries: jax.Array,
        seen: Visible,
        entries: LayerCache | None,
        step: Step,
        runtime: Runtime,
    ) -> jax.Array:
        """Attends to the keys that the indexer chooses, [B, H, T, D]; "context" as well."""
        spec = self.spec
        layout = runtime.layout
        assert spec.indexer is not None
        if applies(entries, step, runtime):  # an indexer chooses among all keys of a row
            complete = {
                name: constrain(a, ("batch", None, None, None), layout)
                for name, a in seen.arrays.items()
            }
            seen = seen._replace(arrays=complete)
        blocks = self.indexer.blocks(step, seen, in_cache=entries is not None)
        index_queries = to_cache(index_queries, row_layout(entries, layout))
        mask = BlockMask(step, seen, index_queries, blocks, spec.indexer, layout)
        out = attend_blocks(q_BHTD, seen, mask, entries, runtime.attention_chunk)
        return checkpoint_name(out, "context")

    def _project(self, x_BTE: jax.Array, name: str, step: Step, runtime: Runtime) -> jax.Array:
        out = linear("bte,ehd->bhtd", x_BTE, getattr(self, f"{name}_proj")[...], runtime)
        out = decoded(out, step, runtime.layout, "q_heads" if name == "q" else "kv_heads")
        if self.spec.bias:
            out = out + getattr(self, f"{name}_bias")[...].astype(x_BTE.dtype)[None, :, None]
        return out

    def _norm_and_rotate(
        self, q_BHTD: jax.Array, k_BKTD: jax.Array | None, step: Step
    ) -> tuple[jax.Array, jax.Array | None]:
        """Norms and rotates queries and keys, in the order that `qk_norm_over` says. The keys may
        be None."""
        spec = self.spec

        def norm(q, k):
            if spec.qk_norm_over == "all_heads":
                return _over_all_heads(self.q_norm, q), None if k is None else _over_all_heads(
                    self.k_norm, k
                )
            return self.q_norm(q), None if k is None else self.k_norm(k)

        q = q_BHTD
        k = k_BKTD
        if spec.qk_norm and spec.qk_norm_over != "rotated_head":
            q, k = norm(q, k)
        if spec.rope:
            table = step.rotation(spec.rope)
            q, k = (None if a is None else rotate(a, spec.rope, table) for a in (q, k))
        if spec.qk_norm and spec.qk_norm_over == "rotated_head":
            q, k = norm(q, k)
        return cast(jax.Array, q), k


def _over_all_heads(norm: RMSNorm, x_BHTD: jax.Array) -> jax.Array:
    B, H, T, D = x_BHTD.shape
    flat = norm(jnp.swapaxes(x_BHTD, 1, 2).reshape(B, T, H * D))
    return jnp.swapaxes(flat.reshape(B, T, H, D), 1, 2)


def temperature(spec: QueryTemperature, positions_BT: jax.Array) -> jax.Array:
    """Returns the factor of queries at these positions, float32[B, 1, T, 1] (arXiv 2501.19399)."""
    steps = jnp.floor((positions_BT.astype(jnp.float32) + spec.offset) / spec.floor)
    return (1.0 + spec.scale * jnp.log1p(steps))[:, None, :, None]
