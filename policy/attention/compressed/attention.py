"""The attention of DeepSeek V4 (transformers' DeepseekV4Attention): to the last tokens, and to
entries that stand for a block of tokens each.

All heads read one vector for each token, which is key and value at once. The scores of a query with
the tokens that it sees and with the entries are computed together: T (C + n) of them for each head
over C tokens and n entries, whatever the window and the choice of the indexer leave of them.

B rows, T tokens, C visible tokens, n entries, E hidden, H heads, D head dimension, r rank of the
query latent, G groups of heads, J = H D / G, Z rank of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention.compressed.compressor import Compressor, compress, turn
from policy.attention.dot_product_attention import Mask, attend
from policy.attention.indexer import IndexedMask, with_auto_axes
from policy.attention.sequence_shards import replicate_length
from policy.cache.layer_cache import LayerCache, LayerOutput, extend, row_layout
from policy.cache.step import Step
from policy.config import CompressedAttention, DecoderConfig, EntryIndexer, Norm, Runtime
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode
from policy.mesh.sharding import decoded, from_cache, to_cache
from policy.ops.linear import linear
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight


class EntryScorer(nnx.Module):
    """Computes the queries of an indexer of entries; its keys are entries of its own compressor.
    Weights: compressor; q_b_proj [r, H, D] and weights_proj [E, H] of its own heads. Its inputs are
    detached: which entries are chosen has no gradient."""

    def __init__(
        self,
        spec: EntryIndexer,
        attention: CompressedAttention,
        config: DecoderConfig,
        rngs: nnx.Rngs,
    ):
        self.spec = spec
        self.rope = attention.rope
        assert attention.compression is not None
        E = config.hidden_size
        H = spec.heads
        D = spec.head_dim
        init = normal(config.initializer_range)
        self.compressor = Compressor(D, attention.compression, attention.norm, config, rngs)
        self.q_b_proj = weight(
            rngs,
            (attention.q_lora_rank, H, D),
            ("q_lora", "q_heads", "kv"),
            init,
            inputs=(0,),
            quantizable=False,
        )
        self.weights_proj = weight(
            rngs, (E, H), ("embed", "q_heads"), init, inputs=(0,), quantizable=False
        )

    def __call__(
        self, x_BTE: jax.Array, q_latent_BTr: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (queries [B, T, H, D], their weights float32[B, T, H]), in float32 as in
        policy/attention/indexer.py."""
        x, q_latent = jax.lax.stop_gradient((x_BTE, q_latent_BTr))
        q = jnp.einsum("btr,rhd->bhtd", q_latent, self.q_b_proj[...].astype(x.dtype))
        q = turn(q, self.rope, step.rotation(self.rope))
        w = jnp.dot(
            x.astype(jnp.float32), self.weights_proj[...].astype(jnp.float32), precision="highest"
        )
        return jnp.swapaxes(q, 1, 2), w * self.spec.heads**-0.5


class TokensAndEntries(Mask):
    """Allows the keys of two masks, one after the other. The queries of `tokens` are the first
    arrays of those of `entries`."""

    def __init__(self, tokens: Mask, entries: Mask):
        self.tokens = tokens
        self.entries = entries
        self.queries = entries.queries

    def of(self, *queries: jax.Array) -> jax.Array:
        """Returns the mask bool[B, T, C + n] of some queries."""
        tokens = self.tokens.of(*queries[: len(self.tokens.queries)])
        return jnp.concatenate([tokens, self.entries.of(*queries)], axis=-1)


class VisibleEntries(NamedTuple):
    """The entries that stand for blocks of tokens: `keys` [B, 1, n, D], the `mask` that says which
    of them a query sees, and the cache that holds them."""

    keys: jax.Array
    mask: Mask
    cache: LayerCache | None


class CompressedMultiQueryAttention(nnx.Module):
    """Computes the attention of DeepSeek V4, as `CompressedAttention` says. Weights: q_a_proj [E,
    r], q_a_norm [r], q_b_proj [r, H, D], kv_proj [E, D], kv_norm [D], sinks [H], o_a_proj [G, J,
    Z], o_b_proj [G, Z, E]; compressor and indexer where the layer has them."""

    def __init__(self, spec: CompressedAttention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        H = spec.heads
        D = spec.head_dim
        r = spec.q_lora_rank
        G = spec.o_groups
        Z = spec.o_lora_rank
        init = normal(config.initializer_range)
        self.q_a_proj = weight(rngs, (E, r), ("embed", "q_lora_up_proj"), init, inputs=(0,))
        self.q_a_norm = RMSNorm(r, spec.norm, rngs)
        self.q_b_proj = weight(rngs, (r, H, D), ("q_lora", "q_heads", "kv"), init, inputs=(0,))
        self.q_b_norm = RMSNorm(D, Norm(spec.norm.eps, "none"), rngs)
        self.kv_proj = weight(rngs, (E, D), ("embed", "kv"), init, inputs=(0,))
        self.kv_norm = RMSNorm(D, spec.norm, rngs)
        self.sinks = weight(rngs, (H,), ("q_heads",), init)
        self.o_a_proj = weight(
            rngs, (G, H * D // G, Z), ("heads", "embed", None), init, inputs=(1,), counts=(0,)
        )
        self.o_b_proj = weight(rngs, (G, Z, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.compression is not None:
            self.compressor = Compressor(D, spec.compression, spec.norm, config, rngs)
            if spec.compression.indexer is not None:
                self.indexer = EntryScorer(spec.compression.indexer, spec, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Returns what attention adds to x_BTE [B, T, E], the cache with the entries of these
        tokens, and the values that the layer reports."""
        if in_explicit_mode():
            return with_auto_axes(self, x_BTE, step, runtime)
        spec = self.spec
        table = step.rotation(self.spec.rope)
        layout = row_layout(cache, runtime.layout)
        q_latent = self._query_latent(x_BTE, step, runtime)
        q = linear("btr,rhd->bhtd", q_latent, self.q_b_proj[...], runtime)
        q = turn(self.q_b_norm(decoded(q, step, runtime.layout, "q_heads")), spec.rope, table)
        q = to_cache(checkpoint_name(q, "query_proj"), layout)
        kv = decoded(linear("bte,ed->btd", x_BTE, self.kv_proj[...], runtime), step, runtime.layout)
        kv = turn(self.kv_norm(kv)[:, None], spec.rope, table)
        kv = checkpoint_name(replicate_length(kv[:, 0], runtime)[:, None], "key_proj")
        seen, cache = extend(cache, step, lookback=spec.window, kv=to_cache(kv, layout))
        keys = seen.arrays["kv"]
        mask = Mask(step, seen, spec.window)
        if spec.compression is not None:
            entries = self._entries(x_BTE, q_latent, step, cache, runtime)
            cache = entries.cache
            keys = jnp.concatenate([keys, entries.keys], axis=2)
            mask = TokensAndEntries(mask, entries.mask)
        out = attend(
            q * spec.head_dim**-0.5,
            keys,
            keys,
            mask,
            runtime.attention_chunk,
            None,
            self.sinks[...],
        )
        out = turn(from_cache(out, runtime.layout), spec.rope, table, back=True)
        out = self._projected(checkpoint_name(out, "context"), runtime)
        return LayerOutput(checkpoint_name(out, "out_proj"), cache, LayerAux())

    def _entries(
        self,
        x_BTE: jax.Array,
        q_latent_BTr: jax.Array,
        step: Step,
        cache: LayerCache | None,
        runtime: Runtime,
    ) -> VisibleEntries:
        """Returns the entries that stand for blocks up to these tokens."""
        assert self.spec.compression is not None
        indexer = self.spec.compression.indexer
        layout = row_layout(cache, runtime.layout)
        compressors = {"": (self.compressor, self._parts(self.compressor, x_BTE, runtime))}
        if indexer is not None:
            own = self.indexer.compressor
            compressors["index_"] = own, self._parts(own, jax.lax.stop_gradient(x_BTE), runtime)
        seen, cache = compress(compressors, step, cache, self.spec.rope, layout)
        entries = seen.arrays[""]
        if indexer is None:
            return VisibleEntries(entries, Mask(step, seen), cache)
        index = seen._replace(arrays={"index": seen.arrays["index_"]})
        queries = self.indexer(x_BTE, q_latent_BTr, step)
        mask = IndexedMask(step, index, queries, indexer, runtime.layout)
        return VisibleEntries(entries, mask, cache)

    def _parts(self, compressor: Compressor, x_BTE: jax.Array, runtime: Runtime) -> jax.Array:
        return replicate_length(compressor.parts(x_BTE, runtime.layout), runtime)

    def _query_latent(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        latent = decoded(
            linear("bte,er->btr", x_BTE, self.q_a_proj[...], runtime), step, runtime.layout
        )
        return checkpoint_name(self.q_a_norm(checkpoint_name(latent, "query_wa_proj")), "mla_q")

    def _projected(self, out_BHTD: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the output [B, T, E]: each group of heads by itself, then all."""
        B, H, T, D = out_BHTD.shape
        G = self.spec.o_groups
        grouped = jnp.swapaxes(out_BHTD.reshape(B, G, H // G, T, D), 2, 3).reshape(B, G, T, -1)
        grouped = checkpoint_name(grouped, "attention_out")
        each = linear("bgtj,gjl->bgtl", grouped, self.o_a_proj[...], runtime)
        return linear("bgtl,gle->bte", each, self.o_b_proj[...], runtime)
