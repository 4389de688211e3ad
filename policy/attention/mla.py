"""Multi-head latent attention (arXiv 2405.04434, section 2.1).

B rows, T tokens, E hidden, H heads, D head dimension, r and c ranks of the query and key-value
latents, U / Y / V dimensions of the part without rotation, the rotated part and the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from policy.attention import block_attention, flash_attention
from policy.attention.attention import temperature
from policy.attention.attention_plan import Keys
from policy.attention.context_parallel import applies, attend_cut
from policy.attention.dot_product_attention import Mask, attend
from policy.attention.indexer import IndexedMask, KeyIndexer, SelectedMask, with_auto_axes
from policy.attention.paged_attention import decode_latent
from policy.attention.sequence_shards import replicate_length
from policy.attention.sparse_attention import attend_selected
from policy.cache.layer_cache import LayerCache, LayerOutput, Visible, extend, row_layout
from policy.cache.step import Step
from policy.config import DecoderConfig, Indexer, LatentAttention, Rope, Runtime, SharedIndexer
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode, reshard_like
from policy.mesh.sharding import decoded, from_cache, to_cache
from policy.ops.adapted import Adapted
from policy.ops.linear import Weight, linear, rounded
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight, zeros
from policy.ops.rope import rotate


@dataclass(frozen=True)
class Expansion:
    """Computes keys and values of every head, [B, H, T, U + Y] and [B, H, T, V].

    Inputs are (latents [B, 1, T, c], rotated keys [B, 1, T, Y]) and the weight [c, H, U + V]. An
    adapter adds its products with the latents, [B, 1, T, r], and its factors [r, H, U + V] and,
    with DoRA, [1, H, U + V].
    """

    nope_dim: int
    runtime: Runtime

    @staticmethod
    def adapted(
        parts: tuple[jax.Array, jax.Array], kv_b: Adapted, runtime: Runtime
    ) -> tuple[tuple[jax.Array, ...], tuple[Weight, ...]]:
        """Returns the inputs for an adapted weight: one entry per token, and arrays by head, as
        devices that hold parts of a sequence exchange and cut them."""
        latent_B1Tc = parts[0]
        low_B1Tr = linear("bktc,cr->bktr", latent_B1Tc, kv_b.a, runtime)
        weights = (kv_b.base, kv_b.b * kv_b.scale)
        dora_scale = () if kv_b.dora_scale is None else (kv_b.dora_scale[None],)
        return (*parts, low_B1Tr), (*weights, *dora_scale)

    def __call__(
        self, parts: tuple[jax.Array, ...], weights: tuple[Weight, ...]
    ) -> tuple[jax.Array, jax.Array]:
        latent_B1Tc, k_rope_B1TY, *low = parts
        base, *adapter = weights
        expanded = linear("btc,chd->bhtd", latent_B1Tc[:, 0], base, self.runtime)
        if adapter:
            b, *dora_scale = adapter
            expanded = expanded + linear("btr,rhd->bhtd", low[0][:, 0], b, self.runtime)
            if dora_scale:
                scale_HD = cast(jax.Array, dora_scale[0])[0]
                expanded = expanded * scale_HD[:, None].astype(expanded.dtype)
        k_nope, values = jnp.split(expanded, [self.nope_dim], axis=-1)
        k_rope = reshard_like(
            jnp.broadcast_to(k_rope_B1TY, (*k_nope.shape[:3], k_rope_B1TY.shape[-1])), k_nope
        )
        keys = jnp.concatenate([k_nope, k_rope], axis=-1)
        return checkpoint_name(keys, "key_proj"), checkpoint_name(values, "value_proj")


@dataclass(frozen=True)
class AbsorbedWeight:
    """The columns of `kv_b_proj` for D numbers of each head, of keys or of values: W [c, H, D].

    With an adapter keys and values are dora_scale * (W l + b a l) of a latent l, for a [c, r],
    b [r, H, D] with the scale in it, and dora_scale [H, D]; None where there is none.
    """

    base: jax.Array
    a: jax.Array | None = None
    b: jax.Array | None = None
    dora_scale: jax.Array | None = None

    @classmethod
    def split(
        cls, kv_b: Weight, nope_dim: int, dtype: DTypeLike, runtime: Runtime
    ) -> tuple[AbsorbedWeight, AbsorbedWeight]:
        """Returns the columns of the keys, `nope_dim` for each head, and those of the values."""

        def parts(array: jax.Array) -> list[jax.Array]:
            return jnp.split(array.astype(dtype), [nope_dim], axis=-1)

        if not isinstance(kv_b, Adapted):
            keys, values = parts(rounded(kv_b, (0,), dtype, runtime))
            return cls(keys), cls(values)
        keys, values = parts(rounded(kv_b.base, (0,), dtype, runtime))
        b_keys, b_values = parts(kv_b.b * kv_b.scale)
        a = kv_b.a.astype(dtype)
        if kv_b.dora_scale is None:
            return cls(keys, a, b_keys), cls(values, a, b_values)
        scale_keys, scale_values = parts(kv_b.dora_scale)
        return cls(keys, a, b_keys, scale_keys), cls(values, a, b_values, scale_values)

    def to_latent(self, q_BHTD: jax.Array) -> jax.Array:
        """Returns the queries [B, H, T, c] whose products with latents are those of `q` with
        keys."""
        if self.dora_scale is not None:
            q_BHTD = q_BHTD * self.dora_scale[:, None]
        q_BHTc = jnp.einsum("bhtd,chd->bhtc", q_BHTD, self.base)
        if self.a is None:
            return q_BHTc
        low = jnp.einsum("bhtd,rhd->bhtr", q_BHTD, self.b)
        return q_BHTc + jnp.einsum("bhtr,cr->bhtc", low, self.a)

    def from_latent(self, latent_BHTc: jax.Array) -> jax.Array:
        """Returns the values [B, H, T, D] of sums of latents."""
        out_BHTD = jnp.einsum("bhtc,chd->bhtd", latent_BHTc, self.base)
        if self.a is not None:
            low = jnp.einsum("bhtc,cr->bhtr", latent_BHTc, self.a)
            out_BHTD = out_BHTD + jnp.einsum("bhtr,rhd->bhtd", low, self.b)
        return out_BHTD if self.dora_scale is None else out_BHTD * self.dora_scale[:, None]


class MultiHeadLatentAttention(nnx.Module):
    """Computes keys and values from a normalised latent of c numbers; all heads share one rotated
    key of Y numbers.

    Without a cache keys and values are expanded. With a cache only (latent, rotated key) is stored,
    c + Y numbers per token, and the expansion is absorbed into the query and the output: the same
    function, with one key-value head of c + Y. A call that sees its own tokens only and is served
    by a kernel expands them as well: U + Y + V products per pair of tokens, not 2 c + Y.
    """

    def __init__(self, spec: LatentAttention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        H = spec.heads
        c = spec.kv_lora_rank
        r = spec.q_lora_rank
        U = spec.nope_dim
        Y = spec.rope.dim
        V = spec.v_dim
        init = normal(config.initializer_range)
        if r is None:
            self.q_proj = weight(rngs, (E, H, U + Y), ("embed", "q_heads", "kv"), init, inputs=(0,))
        else:
            self.q_a_proj = weight(rngs, (E, r), ("embed", "q_lora_up_proj"), init, inputs=(0,))
            self.q_a_layernorm = RMSNorm(r, spec.norm, rngs)
            self.q_b_proj = weight(
                rngs, (r, H, U + Y), ("q_lora", "q_heads", "kv"), init, inputs=(0,)
            )
        self.kv_a_proj = weight(rngs, (E, c + Y), ("embed", "kv_lora_up_proj"), init, inputs=(0,))
        self.kv_a_layernorm = RMSNorm(c, spec.norm, rngs)
        self.kv_b_proj = weight(
            rngs, (c, H, U + V), ("kv_lora", "kv_heads", "kv_head_dim"), init, inputs=(0,)
        )
        self.o_proj = weight(rngs, (H, V, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.bias:
            if r is not None:
                self.q_a_bias = weight(rngs, (r,), ("norm",), zeros)
            self.kv_a_bias = weight(rngs, (c + Y,), ("norm",), zeros)
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)
        if isinstance(spec.indexer, Indexer):
            assert r is not None, "an indexer reads the query latent"
            self.indexer = KeyIndexer(spec.indexer, r, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Returns what attention adds to x_BTE [B, T, E], the cache with the entries of these
        tokens, and the values that the layer reports."""
        if self.spec.indexer and in_explicit_mode():
            return with_auto_axes(self, x_BTE, step, runtime)
        spec = self.spec
        q_latent = self._query_latent(x_BTE, step, runtime)
        queries = decoded(self._queries(x_BTE, q_latent, runtime), step, runtime.layout, "q_heads")
        if spec.temperature is not None:  # of the rotated part as well: a rotation keeps factors
            queries = (queries * temperature(spec.temperature, step.positions)).astype(
                queries.dtype
            )
        q_nope, q_rope = jnp.split(queries, [spec.nope_dim], axis=-1)
        q_rope = self._rotated(q_rope, step)
        kv_a = decoded(
            linear("bte,er->btr", x_BTE, self.kv_a_proj[...], runtime), step, runtime.layout
        )
        kv_a = checkpoint_name(self._biased(kv_a, "kv_a"), "kv_wa_proj")
        latent, k_rope = jnp.split(kv_a, [spec.kv_lora_rank], axis=-1)
        latent = checkpoint_name(self.kv_a_layernorm(latent), "mla_kv")
        k_rope = self._rotated(k_rope[:, None], step)
        index_queries, index_keys = self._index(x_BTE, q_latent, step)
        layout = row_layout(cache, runtime.layout)
        index_keys = None if index_keys is None else to_cache(index_keys, layout)
        new = {} if index_keys is None else {"index": index_keys}
        unselected = spec.indexer is None and flash_attention.served(step, x_BTE.dtype, runtime)
        visible = None
        expanded = cache is None or unselected
        if cache is not None:
            kept = jnp.concatenate(
                [rounded(latent, (-1,), latent.dtype, runtime)[:, None], k_rope], axis=-1
            )
            visible, cache = extend(
                cache, step, lookback=None, latent=to_cache(kept, layout), **new
            )
        if expanded:
            q = checkpoint_name(jnp.concatenate([q_nope, q_rope], axis=-1), "query_proj")
            out, aux = self._expanded(
                q, (latent, k_rope), (index_queries, index_keys), step, cache, runtime
            )
            out = checkpoint_name(out, "attention_out")
        else:
            assert cache is not None and visible is not None
            of_keys, of_values = AbsorbedWeight.split(
                self.kv_b_proj[...], spec.nope_dim, x_BTE.dtype, runtime
            )
            keys = visible.arrays["latent"]
            q = jnp.concatenate([of_keys.to_latent(q_nope), q_rope], axis=-1)
            q = to_cache(q, layout)
            values = keys[..., : spec.kv_lora_rank]
            out = decode_latent(q * spec.scale, cache, step, spec, runtime)
            aux = LayerAux()
            if out is None:
                mask = self._mask(step, visible, index_queries, cache, runtime)
                out, aux = self._attend(q * spec.scale, keys, values, mask, cache, runtime)
            out = of_values.from_latent(from_cache(out, runtime.layout))
        out = from_cache(out, runtime.layout)
        out = self._biased(linear("bhtd,hde->bte", out, self.o_proj[...], runtime), "o")
        return LayerOutput(checkpoint_name(out, "out_proj"), cache, aux)

    def _rotated(self, x_BHTY: jax.Array, step: Step) -> jax.Array:
        rope = self.spec.rope
        return rotate(x_BHTY, rope, step.rotation(rope)) if isinstance(rope, Rope) else x_BHTY

    def _index(self, x_BTE: jax.Array, q_latent_BTr: jax.Array | None, step: Step):
        """Returns (index queries, index keys), None each without an indexer of its own."""
        if q_latent_BTr is None or not isinstance(self.spec.indexer, Indexer):
            return None, None
        return self.indexer(x_BTE, q_latent_BTr, step)

    def _expanded(
        self,
        q_BHTD,
        kept: tuple,
        index: tuple,
        step: Step,
        cache: LayerCache | None,
        runtime: Runtime,
    ):
        """Returns (attention over this call's own tokens [B, H, T, V], LayerAux). The attention has
        the name "context", which the kernels give it themselves.

        kept: the latents [B, T, c] and rotated keys of the tokens. index: their index queries and
        keys.
        """
        expand = Expansion(self.spec.nope_dim, runtime)
        kv_b: Weight = self.kv_b_proj[...]
        cut = applies(cache, step, runtime)
        indexed = self.spec.indexer is not None
        queries, keys = index
        parts = (kept[0][:, None], kept[1])
        weights = (kv_b,)
        if isinstance(kv_b, Adapted):
            parts, weights = Expansion.adapted(parts, kv_b, runtime)
        new = {} if keys is None else {"index": keys}
        q_BHTD = q_BHTD * self.spec.scale
        if cut and not indexed:
            by_head = cast(tuple[jax.Array, ...], weights)
            out = attend_cut(q_BHTD, Keys(parts, by_head, expand), step, runtime)
            return checkpoint_name(out, "context"), LayerAux()
        if cut:  # an indexer chooses among all keys of a row
            parts, new = jax.tree.map(
                lambda a: replicate_length(a[:, 0], runtime)[:, None], (parts, new)
            )
        k, v = expand(parts, weights)
        if not indexed:
            own_names = flash_attention.attend(q_BHTD, k, v, step, runtime)
            if own_names is None and cache is None:
                own_names = block_attention.attend(q_BHTD, k, v, step, runtime)
            if own_names is not None:
                return own_names, LayerAux()
        visible, _ = extend(None, step, k=k, v=v, **new)
        mask = self._mask(step, visible, queries, None, runtime)
        out, aux = self._attend(q_BHTD, k, v, mask, None, runtime)
        return checkpoint_name(out, "context"), aux

    def _attend(
        self, q_BHTD, keys, values, mask: Mask, cache: LayerCache | None, runtime: Runtime
    ) -> tuple[jax.Array, LayerAux]:
        """Attends where `mask` allows it, with the scale already in q."""
        if isinstance(mask, IndexedMask | SelectedMask):
            return attend_selected(q_BHTD, keys, values, mask, cache, runtime)
        return attend(q_BHTD, keys, values, mask, runtime.attention_chunk), LayerAux()

    def _mask(
        self,
        step: Step,
        visible: Visible,
        index_queries: tuple | None,
        cache: LayerCache | None,
        runtime: Runtime,
    ) -> Mask:
        indexer = self.spec.indexer
        if isinstance(indexer, Indexer):
            assert index_queries is not None
            return IndexedMask(step, visible, index_queries, indexer, runtime.layout)
        warms_up = cache is None and runtime.indexer == "dense_warmup"
        if (
            not isinstance(indexer, SharedIndexer)
            or warms_up
            or visible.positions.shape[1] <= indexer.topk
        ):
            return Mask(step, visible)
        assert step.selection is not None, "the decoder hands on what an indexer chooses"
        return SelectedMask(step, visible, step.selection, runtime.layout)

    def _query_latent(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array | None:
        if self.spec.q_lora_rank is None:
            return None
        latent = decoded(
            linear("bte,er->btr", x_BTE, self.q_a_proj[...], runtime), step, runtime.layout
        )
        latent = checkpoint_name(self._biased(latent, "q_a"), "query_wa_proj")
        return checkpoint_name(self.q_a_layernorm(latent), "mla_q")

    def _queries(
        self, x_BTE: jax.Array, latent_BTr: jax.Array | None, runtime: Runtime
    ) -> jax.Array:
        if latent_BTr is None:
            return linear("bte,ehd->bhtd", x_BTE, self.q_proj[...], runtime)
        return linear("btr,rhd->bhtd", latent_BTr, self.q_b_proj[...], runtime)

    def _biased(self, x_BTE: jax.Array, name: str) -> jax.Array:
        return (
            x_BTE + getattr(self, f"{name}_bias")[...].astype(x_BTE.dtype)
            if self.spec.bias
            else x_BTE
        )
