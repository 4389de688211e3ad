"""Experts with a limited capacity: each takes a bounded number of tokens of a row (arXiv
2006.16668, section 2.2).

B rows, T tokens, K = k choices per token, J = T k choices of a row, X experts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from policy.config import Router, Runtime


def limited(
    experts_BTK: jax.Array, segments_BT: jax.Array, router: Router, runtime: Runtime
) -> tuple[jax.Array, jax.Array]:
    """Returns (choices, number dropped float32): padding gets no expert, and an expert no more than
    its capacity, if any."""
    chosen = jnp.where(segments_BT[..., None] != 0, experts_BTK, router.experts)
    if runtime.capacity_factor is None:
        return chosen, jnp.float32(0.0)
    kept = within_capacity(chosen, router.experts, runtime.capacity_factor)
    return kept, jnp.sum(kept != chosen, dtype=jnp.float32)


def capacity(tokens: int, experts_per_token: int, experts: int, factor: float) -> int:
    """Counts the choices that one expert takes from a row of `tokens` tokens: `factor` times its
    share under even use."""
    return int(max(math.ceil(tokens * experts_per_token / experts) * factor, factor))


def within_capacity(experts_BTK: jax.Array, experts: int, factor: float) -> jax.Array:
    """Replaces choices int[B, T, k] beyond the capacity of an expert by `experts` (no expert).

    Earlier tokens of a row go first, and earlier choices of a token.
    """
    B, T, k = experts_BTK.shape
    chosen_BJ = experts_BTK.reshape(B, T * k)
    order = jnp.argsort(chosen_BJ, axis=1, stable=True)
    grouped = jnp.take_along_axis(chosen_BJ, order, axis=1)
    index = jnp.broadcast_to(jnp.arange(T * k), (B, T * k))
    starts = jnp.pad(grouped[:, 1:] != grouped[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    place_in_order = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    place_BJ = (
        jnp.zeros_like(index)
        .at[jnp.arange(B)[:, None], order]
        .set(place_in_order, unique_indices=True)
    )
    kept = place_BJ < capacity(T, k, experts, factor)
    return jnp.where(kept, chosen_BJ, experts).reshape(B, T, k)
