"""How a part of a layer is joined to the stream: what it reads, and where its output goes."""

from __future__ import annotations

import jax
from flax import nnx

from policy.config import DecoderConfig, LayerSpec
from policy.layers.hyper_connections import HyperConnection
from policy.mesh.explicit import reshard_like


class Residual(nnx.Module):
    """The part reads x, and its output is added to x, or takes its place. No weights."""

    def __init__(self, adds: bool):
        self.adds = adds

    def read(self, x_BTE: jax.Array) -> tuple[jax.Array, None]:
        """(what the part reads, what `write` needs besides)."""
        return x_BTE, None

    def write(self, x_BTE: jax.Array, out_BTE: jax.Array, mix: None) -> jax.Array:
        out_BTE = reshard_like(out_BTE, x_BTE)
        return x_BTE + out_BTE if self.adds else out_BTE

    def write_second(self, x_BTE: jax.Array, out_BTE: jax.Array, mix: None) -> jax.Array:
        """Writes the output of a second part that was given the same input; `x_BTE` is what `write` made with the first one."""
        return self.write(x_BTE, out_BTE, mix)


def residual(spec: LayerSpec, config: DecoderConfig, rngs: nnx.Rngs) -> Residual | HyperConnection:
    """The connection of one part of a layer. Hyper-connections take the place of whichever connection the layers have."""
    return Residual(spec.residual) if config.hyper_connections is None else HyperConnection(config, rngs)
