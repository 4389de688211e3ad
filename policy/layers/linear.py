"""Products of activations with weights that may be quantised.

Every such product goes through `linear` (or `policy.layers.grouped.product` where the rows of a product have weights of their
own). Products that stay as they are do not: routers and gates, norms, the indexer, embedding and head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import Runtime


def linear(equation: str, x: jax.Array, weight: jax.Array, runtime: Runtime) -> jax.Array:
    """einsum(equation, x, weight) in x's dtype."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))


def dequantized(weight: jax.Array, dtype, runtime: Runtime) -> jax.Array:
    """The numbers that `linear` multiplies by, where a product needs a part of a weight."""
    return weight.astype(dtype)
