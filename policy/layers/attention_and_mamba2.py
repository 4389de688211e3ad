"""The sum of two mixers that read the same input.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

import jax
from flax import nnx

from policy.attention.attention import GroupedQueryAttention
from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.step import Step
from policy.config import AttentionAndMamba2, DecoderConfig, Runtime
from policy.ops.linear import scaled
from policy.recurrent.mamba2 import Mamba2Mixer


class AttentionAndMamba2Mixer(nnx.Module):
    """Computes the sum of grouped-query attention and of Mamba-2 (Falcon-H1, arXiv 2507.22448). The
    cache of the layer holds keys and values, and the state of Mamba-2."""

    def __init__(self, spec: AttentionAndMamba2, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        self.attention = GroupedQueryAttention(spec.attention, config, rngs)
        self.mamba = Mamba2Mixer(spec.mamba, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Returns the sum of both mixers [B, T, E], each scaled, the cache with the entries of
        these tokens, and the values that both report."""
        attention = self.spec.attention_scales
        mamba = self.spec.mamba_scales
        attended = self.attention(scaled(x_BTE, attention.input), step, cache, runtime)
        mixed = self.mamba(scaled(x_BTE, mamba.input), step, attended.cache, runtime)
        return LayerOutput(
            scaled(attended.hidden, attention.output) + scaled(mixed.hidden, mamba.output),
            mixed.cache,
            attended.aux.merge(mixed.aux),
        )
