"""Norms over the last dimension.

S streams, X numbers of the last dimension.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Norm
from policy.ops.parameter import ones, weight, zeros


class RMSNorm(nnx.Module):
    """Computes x * rsqrt(mean(x^2) + eps), scaled by a weight of the last dimension as `Norm.scale`
    says; statistics in float32."""

    def __init__(self, dim: int, config: Norm, rngs: nnx.Rngs):
        self.config = config
        if config.scale != "none":
            self.weight = weight(
                rngs, (dim,), ("norm",), zeros if config.scale == "zero_centred" else ones
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = cast(jax.Array, _over_rms(x32, self.config.eps))
        if self.config.scale == "none":
            return normed.astype(x.dtype)
        w = self.weight[...]
        if self.config.scale == "after_cast":
            return _scaled(normed.astype(x.dtype), w.astype(x.dtype))
        w32 = w.astype(jnp.float32)
        return _scaled(normed, 1.0 + w32 if self.config.scale == "zero_centred" else w32).astype(
            x.dtype
        )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _over_rms(x: jax.Array, eps: float) -> jax.Array:
    """Returns y = x r with r = 1 / sqrt(mean(x^2) + eps). Its gradient is r (g - y mean(g y))."""
    return x * _inverse_rms(x, eps)


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _over_rms_forward(x: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    r = _inverse_rms(x, eps)
    return x * r, (x, r)


def _over_rms_backward(
    eps: float, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array]:
    x, r = saved
    y = x * r
    total = jax.lax.platform_dependent(g, y, cpu=_inner_product, default=_sum_of_product)
    return (r * (g - y * (total / y.shape[-1])[..., None]),)


def _inner_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the sum of a * b over the last dimension as a product of matrices: XLA on CPU takes
    three to nine times as long for `_sum_of_product` (docs/decisions.md)."""
    return jnp.einsum("...d,...d->...", a, b, precision=jax.lax.Precision.HIGHEST)


def _sum_of_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a * b, axis=-1)


_over_rms.defvjp(_over_rms_forward, _over_rms_backward)


@jax.custom_vjp
def _scaled(y: jax.Array, weight_X: jax.Array) -> jax.Array:
    """Returns y * weight. The gradient of the weight is one sum over all other dimensions.
    Automatic differentiation leaves those of size 1 out of the sum, which XLA on CPU then computes
    several times slower (docs/decisions.md)."""
    return y * weight_X


def _scaled_backward(
    saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    y, weight_X = saved
    return g * weight_X, jnp.sum(g * y, axis=tuple(range(y.ndim - 1)))


_scaled.defvjp(lambda y, weight_X: (y * weight_X, (y, weight_X)), _scaled_backward)


def stream_norm(x: jax.Array, scale: jax.Array, config: Norm) -> jax.Array:
    """Computes the root-mean-square norm of each of several streams x [..., S, X] with a weight [S,
    X] of its own; float32."""
    x = x.astype(jnp.float32)
    w = scale.astype(jnp.float32)
    w = 1.0 + w if config.scale == "zero_centred" else w
    return cast(jax.Array, _over_rms(x, config.eps)) * w


class MeanNorm(nnx.Module):
    """Computes (x - mean) * rsqrt(variance + eps) * weight + bias (layer norm), as LayerNorm
    says."""

    def __init__(self, dim: int, config: LayerNorm, rngs: nnx.Rngs):
        self.config = config
        self.weight = weight(rngs, (dim,), ("norm",), ones)
        if config.bias:
            self.bias = weight(rngs, (dim,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = jnp.float32 if self.config.reductions == "float32" else x.dtype
        y = x.astype(dtype)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = cast(jax.Array, _over_rms(y, self.config.eps))
        y = y * self.weight[...].astype(dtype)
        return (y + self.bias[...].astype(dtype) if self.config.bias else y).astype(x.dtype)


def norm(dim: int, config: Norm | LayerNorm, rngs: nnx.Rngs) -> RMSNorm | MeanNorm:
    """Creates the norm that `config` describes, over a last dimension of `dim`."""
    return RMSNorm(dim, config, rngs) if isinstance(config, Norm) else MeanNorm(dim, config, rngs)
