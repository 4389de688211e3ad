"""Rings: what a layer that looks back a window of tokens at most keeps, window + room entries a slot, however long the row.

Position p is entry p % C, over the one C positions before. `room` is the most tokens of one call, which are all written before the
first of them looks back, with those that may be taken back after (policy/cache/cache.py): then nothing that a query may see is
overwritten, and what was taken back carries the number of a position out of sight. A ring belongs to its slot like a state of fixed
size: rows that share their first tokens each have their own, copied where they part.

Shapes: R repeats of a stack, S slots, K heads, C entries, D head dimension, B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from policy.cache.pages import Pages


class WithRings(NamedTuple):
    """The length or the pages of a cache whose layers with a window keep rings, where those are shorter."""

    length: int | Pages
    room: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """The entries of one name of the layers of a stack part: [R, S, K, C, D]."""

    array: jax.Array


def write(ring: Ring, layer: jax.Array | int, step, value_BKTD: jax.Array) -> Ring:
    """The ring with these entries of layer number `layer` at the step's positions, row b in slot b; padding is dropped."""
    (B, T), C = step.positions.shape, ring.array.shape[3]
    if T > C:
        raise ValueError(f"a call of {T} tokens over a ring of {C} entries; make the cache with more room")
    at = jnp.where(step.segments != 0, step.positions % C, C + jnp.arange(T))
    written = jnp.swapaxes(value_BKTD, 1, 2).astype(ring.array.dtype)
    rows = jnp.arange(B)[:, None]
    return Ring(ring.array.at[layer, rows, :, at].set(written, mode="drop", unique_indices=True))


def positions(step, C: int) -> jax.Array:
    """int32[B, C]: where the entries of a ring sit after the step was written; below 0 where there was no token yet."""
    last = jnp.max(jnp.where(step.segments != 0, step.positions, -1), axis=1, keepdims=True)
    return last - (last - jnp.arange(C)) % C
