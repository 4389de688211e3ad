"""Rows that travel between the devices along a mesh axis, a different number between any two.

P devices, G groups a device, M rows on a device before, R rows after, E elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trip:
    """int32[P, P] each, [i, j] for what i sends to j: number of rows, where they begin on i, and where they begin on j."""

    sizes: jax.Array
    source: jax.Array
    target: jax.Array

    @property
    def back(self) -> Trip:
        """The way back: every row returns to where it was."""
        return Trip(self.sizes.T, self.target.T, self.source.T)


def trips(counts_PX: jax.Array, room: int) -> tuple[Trip, jax.Array]:
    """(the trip, rows that arrive int32[P, P, G]: from device i, at device j, of its group g).

    `counts` are the rows that each device has for each of the P G groups; they lie sorted by group, those of device j being
    j G .. (j + 1) G - 1. A device has place for `room` rows: senders of lower number go first, and of their rows those of lower
    groups; the rest stays behind.
    """
    P = counts_PX.shape[0]
    counts_PPG = counts_PX.reshape(P, P, -1).astype(jnp.int32)
    wanted = counts_PPG.sum(axis=-1)
    sizes = jnp.clip(room - _before(wanted, 0), 0, wanted)
    arriving = jnp.clip(sizes[..., None] - _before(counts_PPG, 2), 0, counts_PPG)
    return Trip(sizes, _before(wanted, 1), _before(sizes, 0)), arriving


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """The sum of the earlier entries along an axis."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def groups_on_arrival(arriving_PG: jax.Array, room: int) -> jax.Array:
    """int[R]: the group of each row that has arrived on a device, and G for the places behind the last one."""
    P, G = arriving_PG.shape
    pile = jnp.searchsorted(jnp.cumsum(arriving_PG.reshape(-1)), jnp.arange(room), side="right")
    return jnp.where(pile < P * G, pile % G, G)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(rows_ME: jax.Array, trip: Trip, lengths: tuple[int, int], axis: str, native: bool) -> jax.Array:
    """The rows [R, E] that a device has after the trip, 0 where none arrived; `lengths` is (M, R). Inside `jax.shard_map`.

    With `native` by `jax.lax.ragged_all_to_all`, which XLA has for TPU and GPU; otherwise every device sees all rows and takes its
    own, which moves P times as much.
    """
    M, R = lengths
    here = jax.lax.axis_index(axis)
    if native:
        empty = jnp.zeros_like(rows_ME, shape=(R, rows_ME.shape[1]))
        sent = trip.source[here], trip.sizes[here], trip.target[here]
        return jax.lax.ragged_all_to_all(rows_ME, empty, *sent, trip.sizes[:, here], axis_name=axis)
    everywhere = jax.lax.all_gather(rows_ME, axis, axis=0, tiled=True)
    start, size = trip.target[:, here], trip.sizes[:, here]
    place = jnp.arange(R)
    sender = jnp.searchsorted(start + size, place, side="right")
    P = start.shape[0]
    sender_in = jnp.minimum(sender, P - 1)
    origin = sender_in * M + trip.source[sender_in, here] + place - start[sender_in]
    arrived = (sender < P) & (place >= start[sender_in])
    return jnp.take(everywhere, jnp.where(arrived, origin, P * M), axis=0, mode="fill", fill_value=0)


def _forward(rows_ME, trip, lengths, axis, native):
    return exchange(rows_ME, trip, lengths, axis, native), trip


def _backward(lengths, axis, native, trip, g_RE):
    return exchange(g_RE, trip.back, lengths[::-1], axis, native), None


exchange.defvjp(_forward, _backward)
