"""Norms over the last dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Norm
from policy.ops.parameter import ones, weight, zeros


class RMSNorm(nnx.Module):
    """Computes x * rsqrt(mean(x^2) + eps), scaled by a weight of the last dimension as `Norm.scale` says; statistics in
    float32."""

    def __init__(self, dim: int, config: Norm, rngs: nnx.Rngs):
        self.config = config
        if config.scale != "none":
            self.weight = weight(rngs, (dim,), ("norm",), zeros if config.scale == "zero_centred" else ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Factors have the shape of x, so that their gradients are sums over all other dimensions: XLA on CPU needs a
        # hundred times as long where a dimension of size 1 is left out of such a sum (docs/decisions.md).
        x32 = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1) + self.config.eps)
        normed = x32 * jnp.broadcast_to(factor[..., None], x.shape)
        if self.config.scale == "none":
            return normed.astype(x.dtype)
        w = jnp.broadcast_to(self.weight[...], x.shape)
        if self.config.scale == "after_cast":
            return normed.astype(x.dtype) * w.astype(x.dtype)
        w32 = w.astype(jnp.float32)
        return (normed * (1.0 + w32 if self.config.scale == "zero_centred" else w32)).astype(x.dtype)


class MeanNorm(nnx.Module):
    """Computes (x - mean) * rsqrt(variance + eps) * weight + bias (layer norm); the reductions as
    `LayerNorm.reductions` says."""

    def __init__(self, dim: int, config: LayerNorm, rngs: nnx.Rngs):
        self.config = config
        self.weight = weight(rngs, (dim,), ("norm",), ones)
        self.bias = weight(rngs, (dim,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = jnp.float32 if self.config.reductions == "float32" else x.dtype
        y = x.astype(dtype)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + jnp.asarray(self.config.eps, dtype))
        return (y * self.weight[...].astype(dtype) + self.bias[...].astype(dtype)).astype(x.dtype)


def norm(dim: int, config: Norm | LayerNorm, rngs: nnx.Rngs) -> RMSNorm | MeanNorm:
    """Creates the norm that `config` describes, over a last dimension of `dim`."""
    return RMSNorm(dim, config, rngs) if isinstance(config, Norm) else MeanNorm(dim, config, rngs)
