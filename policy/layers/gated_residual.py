"""Gated residual streams (Qwen4ExpTextGatedResidual of transformers): G residual vectors of a
token, which every part of a layer reads through a norm and a gate for each number, and to which it
adds its output with a gate for each stream.

B rows, T tokens, G streams, E hidden, Q rank of the gates of reading.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import DecoderConfig, GatedResidual, Norm
from policy.ops.linear import einsum
from policy.ops.norms import stream_norm
from policy.ops.parameter import normal, weight, zeros


class StreamReader(nnx.Module):
    """Reads the streams x [B, T, G, E] as one vector: mean_g(s_g * n_g) with n_g the zero-centred
    norm of x_g and s = sigmoid(up silu(down n / G)).

    Weights: norm [G, E]; down [G, E, Q]; up [Q, G, E]. The norm is float32, the gates are in the
    dtype of x.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = _settings(config)
        G = self.config.streams
        E = config.hidden_size
        Q = self.config.rank
        init = normal(config.initializer_range)
        self._norm = Norm(self.config.norm_eps, "zero_centred")
        self.norm = weight(rngs, (G, E), (None, "norm"), zeros)
        self.down = weight(
            rngs, (G, E, Q), (None, "embed", None), init, inputs=(0, 1), quantizable=False
        )
        self.up = weight(
            rngs, (Q, G, E), (None, None, "embed"), init, inputs=(0,), quantizable=False
        )

    def __call__(self, x_BTGE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (what is read [B, T, E], the normed streams [B, T, G, E])."""
        dtype = x_BTGE.dtype
        G = self.config.streams
        normed = stream_norm(x_BTGE, self.norm[...], self._norm).astype(dtype)
        inner = einsum("btge,ger->btr", normed, self.down[...].astype(dtype)) / G
        gates = jax.nn.sigmoid(
            einsum("btr,rge->btge", jax.nn.silu(inner), self.up[...].astype(dtype))
        )
        return jnp.mean(gates * normed, axis=2), normed


class GatedConnection(nnx.Module):
    """Connects one part F of a layer to the streams, with the interface of
    policy/layers/residual.py: x_g += 2 sigmoid(W n / G)_g F(read(x)). Weights: those of
    StreamReader as `reader`, and inject [G, E, G]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = _settings(config)
        G = self.config.streams
        E = config.hidden_size
        self.reader = StreamReader(config, rngs)
        self.inject = weight(
            rngs,
            (G, E, G),
            (None, "embed", None),
            normal(config.initializer_range),
            inputs=(0, 1),
            quantizable=False,
        )

    def read(self, x_BTGE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (input of the part [B, T, E], the factors of its output for each stream [B, T,
        G])."""
        read, normed = self.reader(x_BTGE)
        logits = (
            einsum("btge,geh->bth", normed, self.inject[...].astype(normed.dtype))
            / self.config.streams
        )
        return read, 2 * jax.nn.sigmoid(logits)

    def write(self, x_BTGE: jax.Array, out_BTE: jax.Array, mix: jax.Array) -> jax.Array:
        """Adds the output of the part to the streams."""
        return x_BTGE + jnp.einsum("btg,bte->btge", mix, out_BTE)

    def write_second(self, x_BTGE: jax.Array, out_BTE: jax.Array, mix: jax.Array) -> jax.Array:
        """Adds the output of a second part that read the same input, after `write`."""
        return self.write(x_BTGE, out_BTE, mix)


class GatedStreams(nnx.Module):
    """The ends of the streams: copies of the embedding at the start, and what the head reads, by a
    StreamReader of its own, `reader`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = _settings(config)
        self.reader = StreamReader(config, rngs)

    def expand(self, x_BTE: jax.Array) -> jax.Array:
        """Copies the embedding into all streams: [B, T, G, E]."""
        return jnp.repeat(x_BTE[:, :, None], self.config.streams, axis=2)

    def reduce(self, x_BTGE: jax.Array) -> jax.Array:
        """Reads the streams: [B, T, E]."""
        return self.reader(x_BTGE)[0]


def _settings(config: DecoderConfig) -> GatedResidual:
    assert isinstance(
        config.hyper_connections, GatedResidual
    )  # other decoders do not create these modules
    return config.hyper_connections
