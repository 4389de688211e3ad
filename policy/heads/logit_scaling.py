"""What becomes of the products of states with the head (policy/specs.py:LogitScaling)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import LogitScaling


def scaled(z: jax.Array, scaling: LogitScaling) -> jax.Array:
    """Computes the logits of products z with the head."""
    z = z if scaling.scale == 1.0 else scaling.scale * z
    return z if scaling.softcap is None else scaling.softcap * jnp.tanh(z / scaling.softcap)


def slope(logits: jax.Array, scaling: LogitScaling) -> jax.Array | float:
    """Returns the derivative of scaled logits by the products with the head."""
    if scaling.softcap is None:
        return scaling.scale
    return scaling.scale * (1.0 - jnp.square(logits / scaling.softcap))
