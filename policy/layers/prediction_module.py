"""A module of multi-token prediction (arXiv 2412.19437, section 2.2): a layer that reads a hidden
state and the next token.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.step import Step
from policy.config import DecoderConfig, MultiTokenPrediction, Runtime
from policy.layers.layer import Layer
from policy.layers.residual import streams
from policy.ops.norms import norm
from policy.ops.parameter import normal, weight

# The modules' path in the tree of weights, and their layer's key in Aux.layers.
NAME = "mtp"
LAYER = f"{NAME}.layer"


class PredictionModule(nnx.Module):
    """The module of one depth. Weights: enorm, hnorm, post_norm [E]; eh_proj [2E, E], the half of
    the embedding first; the weights of the layer. With hyper-connections the streams begin and end
    in the module, which reads one state for each token."""

    def __init__(self, spec: MultiTokenPrediction, config: DecoderConfig, rngs: nnx.Rngs):
        E = config.hidden_size
        self.enorm = norm(E, config.norm, rngs)
        self.hnorm = norm(E, config.norm, rngs)
        self.eh_proj = weight(
            rngs,
            (2 * E, E),
            ("embed", None),
            normal(config.initializer_range),
            inputs=(0,),
            quantizable=False,
        )
        self.streams = streams(config, rngs)
        self.layer = Layer(spec.layer, config, rngs)
        if spec.final_norm:
            self.post_norm = norm(E, config.norm, rngs)

    def __call__(
        self,
        hidden_BTE: jax.Array,
        embedded_BTE: jax.Array,
        step: Step,
        cache: LayerCache | None,
        runtime: Runtime,
    ) -> LayerOutput:
        """Computes the states before the final norm."""
        x = jnp.concatenate([self.enorm(embedded_BTE), self.hnorm(hidden_BTE)], axis=-1)
        x = x @ self.eh_proj[...].astype(x.dtype)
        x = x if self.streams is None else self.streams.expand(x)
        output = self.layer(x, step, cache, runtime)
        if self.streams is None:
            return output
        return output._replace(hidden=self.streams.reduce(output.hidden))
