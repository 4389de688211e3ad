"""The exchange of rows between the devices along a mesh axis, with a different number of rows for
each pair of devices.

P devices, G groups (experts) per device, X = P G groups, M rows on a device before, R rows after, E
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trip:
    """The rows that device i sends to device j, int32[P, P] each: their number, their start on i,
    and their start on j.

    Or int32[P, P, G]: the same for the rows of each group of j.
    """

    sizes: jax.Array
    source: jax.Array
    target: jax.Array

    @property
    def back(self) -> Trip:
        """Returns the trip that brings every row back."""
        return Trip(*(jnp.swapaxes(a, 0, 1) for a in (self.sizes, self.target, self.source)))

    def slices(self, here: jax.Array) -> tuple[jax.Array, ...]:
        """Returns what `jax.lax.ragged_all_to_all` asks of device `here`: where the rows that it
        sends start, their numbers, where they arrive, and the numbers of the rows that it receives.
        """
        each = self.source[here], self.sizes[here], self.target[here], self.sizes[:, here]
        return tuple(array.reshape(-1) for array in each)


def trips(counts_PX: jax.Array, room: int) -> tuple[Trip, jax.Array]:
    """Returns (the trip, the number of rows that arrive from device i at device j for its group g,
    int32[P, P, G]).

    counts: the rows that each device has for each of the P G groups. Rows are sorted by group;
    device j has the groups j G .. (j + 1) G - 1. room: the rows that a device can receive. Senders
    with a lower number go first, and lower groups of one sender; the remaining rows are not sent.
    """
    P = counts_PX.shape[0]
    counts_PPG = counts_PX.reshape(P, P, -1).astype(jnp.int32)
    requested = counts_PPG.sum(axis=-1)
    sizes = jnp.clip(room - _before(requested, 0), 0, requested)
    arriving = jnp.clip(sizes[..., None] - _before(counts_PPG, 2), 0, counts_PPG)
    return Trip(sizes, _before(requested, 1), _before(sizes, 0)), arriving


def trips_by_group(counts_PX: jax.Array, groups: int) -> Trip:
    """Returns the trip on which rows arrive ordered by group, and by sender within a group.

    counts: as in `trips`. groups: of a device, G. All rows must have room.
    """
    P = counts_PX.shape[0]
    counts_PPG = counts_PX.reshape(P, P, groups).astype(jnp.int32)
    source = _before(counts_PX.astype(jnp.int32), 1).reshape(counts_PPG.shape)
    by_place = counts_PPG.transpose(1, 2, 0).reshape(
        P, groups * P
    )  # in the order in which they lie on a receiver
    target = _before(by_place, 1).reshape(P, groups, P).transpose(2, 0, 1)
    return Trip(counts_PPG, source, target)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """Returns the sum of the earlier entries along an axis."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def groups_on_arrival(arriving_PG: jax.Array, room: int) -> jax.Array:
    """Returns the group of each row that has arrived on a device, int[R], and G behind the last
    row."""
    P, G = arriving_PG.shape
    pile = jnp.searchsorted(jnp.cumsum(arriving_PG.reshape(-1)), jnp.arange(room), side="right")
    return jnp.where(pile < P * G, pile % G, G)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(
    rows_ME: jax.Array, trip: Trip, lengths: tuple[int, int], axis: str, native: bool
) -> jax.Array:
    """Returns the rows [R, E] of a device after the trip, 0 where none arrived. Runs inside
    `jax.shard_map`.

    lengths: (M, R). native: whether to use `jax.lax.ragged_all_to_all`, which XLA has for TPU and
    GPU. Otherwise every device receives all rows and selects its own, which moves P times as much.
    """
    M, R = lengths
    here = jax.lax.axis_index(axis)
    if native:
        empty = jnp.zeros_like(rows_ME, shape=(R, rows_ME.shape[1]))
        return jax.lax.ragged_all_to_all(rows_ME, empty, *trip.slices(here), axis_name=axis)
    everywhere = jax.lax.all_gather(rows_ME, axis, axis=0, tiled=True)
    start = trip.target[:, here]
    size = trip.sizes[:, here]
    place = jnp.arange(R)
    sender = jnp.searchsorted(start + size, place, side="right")
    P = start.shape[0]
    sender_in = jnp.minimum(sender, P - 1)
    origin = sender_in * M + trip.source[sender_in, here] + place - start[sender_in]
    arrived = (sender < P) & (place >= start[sender_in])
    return jnp.take(
        everywhere, jnp.where(arrived, origin, P * M), axis=0, mode="fill", fill_value=0
    )


def exchange_uninitialized(rows_M: jax.Array, trip: Trip, room: int, axis: str) -> jax.Array:
    """Returns the rows [room, ...] of a device after the trip; where none arrived, anything. TPU
    and GPU only.

    It has no gradient. Inside `jax.shard_map`.
    """
    here = jax.lax.axis_index(axis)
    blank = jax.lax.empty((room, *rows_M.shape[1:]), rows_M.dtype)
    blank = jax.lax.pcast(blank, tuple(jax.typeof(rows_M).manual_axis_type.varying), to="varying")
    return jax.lax.ragged_all_to_all(rows_M, blank, *trip.slices(here), axis_name=axis)


def _forward(rows_ME, trip, lengths, axis, native):
    return exchange(rows_ME, trip, lengths, axis, native), trip


def _backward(lengths, axis, native, trip, g_RE):
    return exchange(g_RE, trip.back, lengths[::-1], axis, native), None


exchange.defvjp(_forward, _backward)
