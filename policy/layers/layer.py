"""One layer: a mixer and a feed-forward with their norms and residual connections.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
from flax import nnx

from policy.attention.attention import GroupedQueryAttention
from policy.attention.compressed.attention import CompressedMultiQueryAttention
from policy.attention.mla import MultiHeadLatentAttention
from policy.cache.layer_cache import LayerCache, LayerOutput, write_routes
from policy.cache.step import Step
from policy.config import (
    Attention,
    AttentionAndMamba2,
    CompressedAttention,
    DecoderConfig,
    DenseAndExperts,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Matrix,
    Mlp,
    Moe,
    Runtime,
    ShortConv,
)
from policy.experts.dense_and_experts import DensePlusExperts
from policy.experts.mlp import FeedForward, SquareMatrix
from policy.experts.moe import MixtureOfExperts
from policy.intermediates import LayerAux, observe
from policy.layers.attention_and_mamba2 import AttentionAndMamba2Mixer
from policy.layers.engram import NgramLookup
from policy.layers.layer_embeddings import LayerEmbeddingReader
from policy.layers.residual import Mix, residual
from policy.mesh.sharding import decoded
from policy.ops.dropout import drop
from policy.ops.linear import scaled
from policy.ops.norms import norm
from policy.ops.parameter import Constant, ones
from policy.recurrent.delta_net import DeltaNet
from policy.recurrent.kimi_delta import KimiDelta
from policy.recurrent.mamba2 import Mamba2Mixer
from policy.recurrent.short_conv import ShortConvolution

MIXERS = {
    Attention: GroupedQueryAttention,
    LatentAttention: MultiHeadLatentAttention,
    CompressedAttention: CompressedMultiQueryAttention,
    GatedDeltaNet: DeltaNet,
    KimiDeltaAttention: KimiDelta,
    ShortConv: ShortConvolution,
    Mamba2: Mamba2Mixer,
    AttentionAndMamba2: AttentionAndMamba2Mixer,
}
FEED_FORWARDS = {
    Mlp: FeedForward,
    Matrix: SquareMatrix,
    Moe: MixtureOfExperts,
    DenseAndExperts: DensePlusExperts,
}


class AfterMixer(NamedTuple):
    """A layer between its mixer and its feed-forward: `hidden`, the residual stream after the
    mixer; `normed` [B, T, E], the input of the mixer, and `mix`, how its residual connection mixes
    streams (policy/layers/residual.py), both None without a mixer."""

    hidden: jax.Array
    normed: jax.Array | None
    mix: Mix
    cache: LayerCache | None
    aux: LayerAux


class Layer(nnx.Module):
    """x += lookup(x); x += mixer(x); x += feed_forward(x); x += layer_embedding(x), with the norms
    and in the form that LayerSpec describes; an absent part adds nothing."""

    def __init__(self, spec: LayerSpec, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        for name in spec.norms:
            setattr(self, name, norm(config.hidden_size, config.norm, rngs))
        if spec.mixer is not None:
            self.mixer_residual = residual(spec, config, rngs)
            self.mixer = MIXERS[type(spec.mixer)](spec.mixer, config, rngs)
        if spec.feed_forward is not None:
            if not spec.parallel:
                self.feed_forward_residual = residual(spec, config, rngs)
            self.feed_forward = FEED_FORWARDS[type(spec.feed_forward)](
                spec.feed_forward, config, rngs
            )
        if spec.scalar:
            self.scalar = Constant(ones(rngs.params(), (1,)), out_sharding=(None,))
        if spec.engram is not None:
            self.lookup = NgramLookup(spec.engram, config, rngs)
        if spec.layer_embedding is not None:
            self.layer_embedding = LayerEmbeddingReader(spec.layer_embedding, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Returns the residual stream after the layer, in the shape of x_BTE, the cache with the
        entries of these tokens, and the values that the layer reports."""
        spec = self.spec
        aux = LayerAux()
        if spec.engram is not None:
            update, cache, aux = self.lookup(x_BTE, step, cache, runtime)
            x_BTE = x_BTE + update
        mixed = self.mix(x_BTE, step, cache, runtime)
        cache = mixed.cache
        x_BTE = decoded(mixed.hidden, step, runtime.layout)
        aux = aux.merge(mixed.aux)
        if spec.feed_forward is not None:
            normed, mix = self.enter(x_BTE, mixed.normed, mixed.mix)
            fed, fed_aux = self.feed_forward(decoded(normed, step, runtime.layout), step, runtime)
            x_BTE = decoded(self.leave(x_BTE, fed, step, mix), step, runtime.layout)
            aux = aux.merge(fed_aux)
            cache = write_routes(cache, step, fed_aux.routes)
        if spec.layer_embedding is not None:
            x_BTE = decoded(
                x_BTE + self.layer_embedding(x_BTE, step, runtime), step, runtime.layout
            )
        if spec.scalar:
            x_BTE = x_BTE * jax.lax.stop_gradient(self.scalar[...]).astype(x_BTE.dtype)
        aux = aux.merge(observe(x_BTE, step.segments, runtime.record))
        return LayerOutput(x_BTE, cache, aux)

    def mix(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> AfterMixer:
        """Runs the mixer, if the layer has one, with its norms and its residual connection."""
        if self.spec.mixer is None:
            return AfterMixer(x_BTE, None, None, cache, LayerAux())
        read, mix = cast(Any, self.mixer_residual).read(x_BTE)
        normed = decoded(self._norm("input_layernorm", read), step, runtime.layout)
        mixed, cache, aux = self.mixer(normed, step, cache, runtime)
        if "mixed" in runtime.record:
            aux = aux.merge(LayerAux(mixed=mixed))
        mixed = drop(self._scaled(self._norm("post_attention_layernorm", mixed)), step.dropout, 0)
        x_BTE = self.mixer_residual.write(x_BTE, mixed, mix)
        return AfterMixer(x_BTE, normed, mix, cache, aux)

    def enter(
        self, x_BTE: jax.Array, normed_BTE: jax.Array | None, mix: Mix
    ) -> tuple[jax.Array, Mix]:
        """Computes (input of the feed-forward, the mix that `leave` needs). `normed` and `mix` come
        from the mixer."""
        if self.spec.parallel:
            assert normed_BTE is not None  # a parallel layer has a mixer
            return normed_BTE, mix
        read, mix = self.feed_forward_residual.read(x_BTE)
        return self._norm("pre_feedforward_layernorm", read), mix

    def leave(self, x_BTE: jax.Array, fed_BTE: jax.Array, step: Step, mix: Mix) -> jax.Array:
        """Adds the output of the feed-forward to x."""
        fed_BTE = drop(
            self._scaled(self._norm("post_feedforward_layernorm", fed_BTE)), step.dropout, 1
        )
        if self.spec.parallel:
            return self.mixer_residual.write_second(x_BTE, fed_BTE, mix)
        return self.feed_forward_residual.write(x_BTE, fed_BTE, mix)

    def _scaled(self, part_BTE: jax.Array) -> jax.Array:
        """Multiplies the output of a part by the scale at which the residual stream takes it."""
        return scaled(part_BTE, self.spec.residual_scale)

    def _norm(self, name: str, x_BTE: jax.Array) -> jax.Array:
        return getattr(self, name)(x_BTE) if name in self.spec.norms else x_BTE
