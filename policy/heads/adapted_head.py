"""An output projection with an adapter, as one product of longer states and a wider weight:

    W h + s B (A h) = [W, B] [h, s A h]

so that tiles of the vocabulary, their gradients and devices that share them know of no adapter. It
copies W; a projection has an adapter only where `model.adapter.targets` names it.

M tokens, E hidden, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from policy.ops.adapted import Adapted

Head = jax.Array | Adapted
"""The output projection [V, E]."""


class HeadProduct(NamedTuple):
    """States [M, X] and a projection [V, X] whose product are the logits: X is E, or E + r."""

    hidden: jax.Array
    weight: jax.Array


def joined(hidden_ME: jax.Array, weight_VE: Head) -> HeadProduct:
    """Returns states and projection without an adapter whose product is that of these."""
    if not isinstance(weight_VE, Adapted):
        return HeadProduct(hidden_ME, weight_VE)
    low_Mr = low(hidden_ME, weight_VE)
    hidden = jnp.concatenate([hidden_ME, low_Mr], axis=-1)
    base = jax.lax.stop_gradient(weight_VE.base)
    weight = jnp.concatenate([base, weight_VE.b.T.astype(base.dtype)], axis=1)
    if weight_VE.dora_scale is not None:
        weight = weight * weight_VE.dora_scale[:, None].astype(weight.dtype)
    return HeadProduct(hidden, weight)


def low(hidden_ME: jax.Array, weight_VE: Adapted) -> jax.Array:
    """Computes s A h, [M, r] in the dtype of the states."""
    product = hidden_ME @ weight_VE.a.astype(hidden_ME.dtype)
    return product * jnp.asarray(weight_VE.scale, hidden_ME.dtype)
