"""The sum of a dense feed-forward and a mixture of experts.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

import jax
from flax import nnx

from policy.cache.step import Step
from policy.config import DecoderConfig, DenseAndExperts, Runtime
from policy.experts.mlp import FeedForward
from policy.experts.moe import MixtureOfExperts
from policy.intermediates import LayerAux
from policy.ops.norms import norm


class DensePlusExperts(nnx.Module):
    """Computes norm(dense(norm(x))) + norm(experts(norm(x))); the router scores x itself."""

    def __init__(self, spec: DenseAndExperts, config: DecoderConfig, rngs: nnx.Rngs):
        self.dense_input_norm = norm(config.hidden_size, spec.norm, rngs)
        self.dense_output_norm = norm(config.hidden_size, spec.norm, rngs)
        self.experts_input_norm = norm(config.hidden_size, spec.norm, rngs)
        self.experts_output_norm = norm(config.hidden_size, spec.norm, rngs)
        self.dense = FeedForward(spec.dense, config, rngs)
        self.experts = MixtureOfExperts(spec.experts, config, rngs)

    def __call__(
        self, x_BTE: jax.Array, step: Step, runtime: Runtime
    ) -> tuple[jax.Array, LayerAux]:
        """Returns (x_BTE, LayerAux of the router)."""
        dense, _ = self.dense(self.dense_input_norm(x_BTE), step, runtime)
        experts, aux = self.experts(
            self.experts_input_norm(x_BTE), step, runtime, router_input=x_BTE
        )
        return self.dense_output_norm(dense) + self.experts_output_norm(experts), aux
