"""Communication between the processes that compute one run together.

All processes run the same program and take the same decisions, because they decide from the same
values on the host. Each process holds the shards of its own devices. The functions below bring the
value of an array, or a value that one process alone knows, to all processes. Every process must
call them at the same places, in the same order, from its main thread. In a run of one process they
return their argument.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from policy.mesh import serialization


def count() -> int:
    """Counts the processes. Does not initialise the devices of a run of one process."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def first() -> bool:
    """Tells whether this is process 0, which writes logs and reports."""
    return index() == 0


def on_host(array: ArrayLike) -> np.ndarray:
    """Returns the full array on the host of each process."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    if not isinstance(array.sharding, NamedSharding):
        return multihost_utils.process_allgather(array, tiled=True)
    return _everywhere(array)


def _everywhere(array: jax.Array) -> np.ndarray:
    """Replicates the array. Waits for all devices of this process: on CPUs programs that overlap
    may deadlock."""
    sharding = cast(NamedSharding, array.sharding)
    place = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return np.asarray(jax.block_until_ready(jax.jit(_same, out_shardings=place)(array)))


def _same(array):
    return array


def device_put_global(tree: object, sharding: Sharding) -> Any:
    """Puts arrays that every host has on the devices of `sharding`. Each process writes the shards
    of its own devices.

    `jax.device_put` would compare the arrays of all processes at every call.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda shard: np.asarray(array[shard])
        )

    return jax.tree.map(place, tree)


def all_gather_object(value: object) -> list:
    """Returns the values of all processes, in the order of their numbers.

    Raises TypeError for a type that policy/mesh/serialization.py does not know.
    """
    if count() == 1:
        return [value]
    own = np.frombuffer(serialization.write(value), np.uint8)
    [sizes] = _stacked(np.asarray([len(own)], np.int32)).T
    padded = np.zeros(
        1 << (int(sizes.max()) - 1).bit_length(), np.uint8
    )  # few lengths, few programs
    padded[: len(own)] = own
    return [
        serialization.read(row[:size].tobytes())
        for row, size in zip(_stacked(padded), sizes, strict=True)
    ]


def _stacked(own: np.ndarray) -> np.ndarray:
    """Stacks the arrays of all processes, which have the same shape: [processes, ...]."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.asarray(devices).reshape(count(), -1), ("process", "device"))
    place = NamedSharding(mesh, PartitionSpec("process"))
    return _everywhere(
        jax.make_array_from_callback((count(), *own.shape), place, lambda _: own[None])
    )


def broadcast(value: Any) -> Any:
    """Returns the value of process 0 on every process."""
    return all_gather_object(value if first() else None)[0]
