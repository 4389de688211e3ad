"""The sliding-window cache of layers that look back a limited number of tokens: window +
call_tokens entries per slot.

Position p is entry p % C and replaces position p - C. `call_tokens` is the largest number of tokens
of one call, including those that `commit` may take back: all of them are written before the first
of them looks back. So no entry that a query may see is overwritten, and an entry that was taken
back has a position that no query sees. Entries belong to their slot, as states of fixed size do:
rows that share their first tokens each have a copy.

Shapes: R repeats of a stack, S slots, K heads, C entries, D head dimension, B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from policy.cache.pages import Pages
from policy.cache.step import Step


class WithSlidingWindows(NamedTuple):
    """The length (or pages) of a cache whose windowed layers store window + `call_tokens` entries
    where that is shorter."""

    length: int | Pages
    call_tokens: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowEntries:
    """The entries of one name for the layers of a stack part: [R, S, K, C, D]."""

    array: jax.Array


def write(
    entries: WindowEntries, layer: jax.Array | int, step: Step, value_BKTD: jax.Array
) -> WindowEntries:
    """Writes entries of layer number `layer` at the step's positions, row b in slot b. Padding is
    dropped.

    Raises ValueError when a call has more tokens than there are entries.
    """
    (B, T), C = step.positions.shape, entries.array.shape[3]
    if T > C:
        raise ValueError(
            f"a call of {T} tokens over a sliding-window cache of {C} entries; make the cache "
            "with more call_tokens"
        )
    at = jnp.where(step.segments != 0, step.positions % C, C + jnp.arange(T))
    written = jnp.swapaxes(value_BKTD, 1, 2).astype(entries.array.dtype)
    rows = jnp.arange(B)[:, None]
    return WindowEntries(
        entries.array.at[layer, rows, :, at].set(written, mode="drop", unique_indices=True)
    )


def positions(step: Step, C: int) -> jax.Array:
    """Returns the position of each entry after the step was written, int32[B, C]; negative where no
    token was written."""
    last = jnp.max(jnp.where(step.segments != 0, step.positions, -1), axis=1, keepdims=True)
    return last - (last - jnp.arange(C)) % C
