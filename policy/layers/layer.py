"""One pre-norm residual layer."""

from __future__ import annotations

import jax
from flax import nnx

from policy.cache import LayerCache, Step
from policy.config import Attention, DecoderConfig, GatedDeltaNet, LatentAttention, LayerSpec, Mlp, Moe, Runtime
from policy.layers.attention import GroupedQueryAttention
from policy.layers.delta_net import DeltaNet
from policy.layers.mla import MultiHeadLatentAttention
from policy.layers.mlp import FeedForward
from policy.layers.moe import MixtureOfExperts
from policy.layers.norms import RMSNorm

MIXERS = {Attention: GroupedQueryAttention, LatentAttention: MultiHeadLatentAttention, GatedDeltaNet: DeltaNet}
FEED_FORWARDS = {Mlp: FeedForward, Moe: MixtureOfExperts}


class Layer(nnx.Module):
    """x += mixer(norm(x)); x += feed_forward(norm(x)); an absent part adds nothing."""

    def __init__(self, spec: LayerSpec, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        if spec.mixer is not None:
            self.input_layernorm = RMSNorm(config.hidden_size, config.norm, rngs)
            self.mixer = MIXERS[type(spec.mixer)](spec.mixer, config, rngs)
        if spec.feed_forward is not None:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm, rngs)
            self.feed_forward = FEED_FORWARDS[type(spec.feed_forward)](spec.feed_forward, config, rngs)

    def __call__(self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime):
        """Returns (x_BTE, cache, statistics of the router: {} for a dense layer)."""
        statistics = {}
        if self.spec.mixer is not None:
            mixed, cache = self.mixer(self.input_layernorm(x_BTE), step, cache, runtime)
            x_BTE = x_BTE + mixed
        if self.spec.feed_forward is not None:
            normed = self.post_attention_layernorm(x_BTE)
            if isinstance(self.spec.feed_forward, Moe):
                fed, statistics = self.feed_forward(normed, step.segments)
            else:
                fed = self.feed_forward(normed)
            x_BTE = x_BTE + fed
        return x_BTE, cache, statistics
