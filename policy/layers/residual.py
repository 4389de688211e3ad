"""Residual connections: the input that a part of a layer reads, and how its output is written
back.

B rows, T tokens, E hidden.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from policy.config import DecoderConfig, GatedResidual, LayerSpec
from policy.layers.gated_residual import GatedConnection, GatedStreams
from policy.layers.hyper_connections import HyperConnection, Streams
from policy.mesh.explicit import reshard_like

# What a connection computes when it reads, for its own `write`; only the connection knows its form.
Mix = Any


class Residual(nnx.Module):
    """The part reads x; its output is added to x if `adds`, otherwise it replaces x. It has no
    weights."""

    def __init__(self, adds: bool):
        self.adds = adds

    def read(self, x_BTE: jax.Array) -> tuple[jax.Array, None]:
        """Returns (input of the part, the mix that `write` needs)."""
        return x_BTE, None

    def write(self, x_BTE: jax.Array, out_BTE: jax.Array, mix: None) -> jax.Array:
        """Writes the output of the part to x."""
        out_BTE = reshard_like(out_BTE, x_BTE)
        return x_BTE + out_BTE if self.adds else out_BTE

    def write_second(self, x_BTE: jax.Array, out_BTE: jax.Array, mix: None) -> jax.Array:
        """Writes the output of a second part that read the same input; `x_BTE` is the result of
        `write` with the first."""
        return self.write(x_BTE, out_BTE, mix)


def residual(
    spec: LayerSpec, config: DecoderConfig, rngs: nnx.Rngs
) -> Residual | HyperConnection | GatedConnection:
    """Creates the residual connection of one part of a layer. Several residual streams replace the
    plain connection."""
    match config.hyper_connections:
        case None:
            return Residual(spec.residual)
        case GatedResidual():
            return GatedConnection(config, rngs)
    return HyperConnection(config, rngs)


def streams(config: DecoderConfig, rngs: nnx.Rngs) -> Streams | GatedStreams | None:
    """Creates the ends of the residual streams of a decoder; None if tokens have one residual
    vector."""
    match config.hyper_connections:
        case None:
            return None
        case GatedResidual():
            return GatedStreams(config, rngs)
    return Streams(config, rngs)
