"""Root-mean-square norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import Norm
from policy.layers.parameter import ones, weight, zeros


class RMSNorm(nnx.Module):
    """x * rsqrt(mean(x^2) + eps), scaled by a weight of the last dimension as `Norm.scale` says; statistics in float32."""

    def __init__(self, dim: int, config: Norm, rngs: nnx.Rngs):
        self.config = config
        init = zeros if config.scale == "zero_centred" else ones
        self.weight = weight(rngs, (dim,), ("norm",), init)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.config.eps)
        w = self.weight[...]
        if self.config.scale == "after_cast":
            return normed.astype(x.dtype) * w.astype(x.dtype)
        w32 = w.astype(jnp.float32)
        return (normed * (1.0 + w32 if self.config.scale == "zero_centred" else w32)).astype(x.dtype)
