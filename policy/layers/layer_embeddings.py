"""Embeddings for each layer (Gemma 4): vectors of n numbers that a layer reads besides its residual
stream.

B rows, T tokens, V vocabulary, E hidden, L layers, n = `LayerEmbedding.dim`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.step import Step
from policy.config import DecoderConfig, LayerEmbedding, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.layers.engram import look_up
from policy.mesh.explicit import in_explicit_mode, spec_of
from policy.mesh.sharding import constrain, decoded
from policy.ops.linear import linear
from policy.ops.norms import norm
from policy.ops.parameter import RowTable, normal, weight

# The path of the table among the weights.
TABLE = "layer_embeddings.table"


def table_rows(step: Step) -> jax.Array:
    """Returns int32[B, T, 1]: the rows of the table that the tokens of a step look up."""
    assert step.tokens is not None
    return step.tokens[..., None]


class LayerEmbeddings(nnx.Module):
    """Makes the embeddings of all layers from tokens and their embeddings.

    Weights: table [V, L n]; projection [E, L, n]; norm [n]. `table` may hold the rows that the
    tokens of a call look up, [B, T, 1, L n], instead of the table (policy/execution/row_tables.py).
    """

    def __init__(self, spec: LayerEmbedding, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec, init = spec, normal(config.initializer_range)
        E = config.hidden_size
        L = len(config.layers)
        n = spec.dim
        self.table = weight(rngs, (spec.vocab_size, L * n), (None, "engram_row"), init, RowTable)
        self.projection = weight(rngs, (E, L, n), ("embed", None, None), init, inputs=(0,))
        self.norm = norm(n, config.norm, rngs)

    def __call__(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        """Returns [L, B, T, n] for the embeddings `x` of the step's tokens, before dropout."""
        dtype = x_BTE.dtype
        n = self.spec.dim
        rows = self.table[...]
        if rows.ndim == 2:
            rows = look_up(rows, table_rows(step), dtype, runtime)
        rows = constrain(rows, ("batch", "length", None, None), runtime.layout)
        places = spec_of(rows) if in_explicit_mode() else None
        of_tokens = jnp.reshape(rows, (*x_BTE.shape[:2], -1, n), out_sharding=places) * jnp.asarray(
            math.sqrt(n), dtype
        )
        projected = linear("bte,eln->btln", x_BTE, self.projection[...], runtime)
        of_context = self.norm(projected * jnp.asarray(x_BTE.shape[-1] ** -0.5, dtype))
        both = (of_context + of_tokens) * jnp.asarray(2.0**-0.5, dtype)
        both = constrain(
            decoded(both, step, runtime.layout), ("batch", "length", None, None), runtime.layout
        )
        return jnp.moveaxis(both, 2, 0)


class LayerEmbeddingReader(nnx.Module):
    """Computes what a layer adds to its residual stream: norm(W (activation(G x) * e)).

    Weights: gate [E, n], projection [n, E], norm [E].
    """

    def __init__(self, spec: LayerEmbedding, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec, init = spec, normal(config.initializer_range)
        E = config.hidden_size
        n = spec.dim
        self.gate = weight(rngs, (E, n), ("embed", "mlp"), init, inputs=(0,))
        self.projection = weight(rngs, (n, E), ("mlp", "embed"), init, inputs=(0,))
        self.norm = norm(E, config.norm, rngs)

    def __call__(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        """Returns what the layer adds to its residual stream, [B, T, E], from x_BTE and the layer's
        embeddings of the tokens in `step`."""
        assert step.layer_embeddings is not None, "the decoder makes them"
        gate = ACTIVATIONS[self.spec.activation](
            linear("bte,en->btn", x_BTE, self.gate[...], runtime)
        )
        added = linear("btn,ne->bte", gate * step.layer_embeddings, self.projection[...], runtime)
        return self.norm(added)
