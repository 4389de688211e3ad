"""What comes before a token in its sequence.

The sequences of a row are its segments, one after the other. B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def before(x_BT: jax.Array, times: int = 1) -> jax.Array:
    """Returns [B, T, ...]: at t the entry of the token `times` places before token t.

    It means nothing where `scored` is false: there may be 0, or the entry of another sequence.
    """
    T, others = x_BT.shape[1], [(0, 0)] * (x_BT.ndim - 2)
    times = min(times, T)
    return jnp.pad(x_BT[:, : T - times], ((0, 0), (times, 0), *others))


def scored(segments_BT: jax.Array, times: int = 1) -> jax.Array:
    """Returns bool[B, T]: whether a token is real and has `times` tokens before it in its sequence, so that `before`
    holds what predicts it."""
    return (before(segments_BT, times) == segments_BT) & (segments_BT != 0)


def first(segments_BT: jax.Array) -> jax.Array:
    """Returns bool[B, T]: whether a token is the first of its sequence."""
    return (segments_BT != 0) & ~scored(segments_BT)
