"""Several processes that compute one run together.

All of them run the same program and take the same decisions, because they take them by the same numbers of the host. Each holds its
own shards of every array, those of its devices. What the host wants of an array, or one process alone knows, has to reach all of
them: by the functions below, which every process calls at the same places, in the same order, from its main thread. In a run of one
process they give back what they are given.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from policy.mesh import serialization


def count() -> int:
    """How many processes there are. Does not start the devices of a run of one."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def first() -> bool:
    """Whether this process is the one that writes what people read."""
    return index() == 0


def on_host(array) -> np.ndarray:
    """The whole array, on the host of each process."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    if not isinstance(array.sharding, NamedSharding):
        return multihost_utils.process_allgather(array, tiled=True)
    return _everywhere(array)


def _everywhere(array: jax.Array) -> np.ndarray:
    """Returns when all devices of this process have it, not only the first: on CPUs programs that overlap may deadlock."""
    place = NamedSharding(array.sharding.mesh, PartitionSpec(), memory_kind=array.sharding.memory_kind)
    return np.asarray(jax.block_until_ready(jax.jit(_same, out_shardings=place)(array)))


def _same(array):
    return array


def device_put_global(tree, sharding: Sharding):
    """Arrays that every host has, as `sharding` says; each process brings the shards of its own devices there. (`jax.device_put`
    would first compare the arrays of all processes, at every call.)"""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda shard: np.asarray(array[shard]))

    return jax.tree.map(place, tree)


def all_gather_object(value: Any) -> list:
    """The values of all processes, by the number of the process; of kinds that policy/mesh/serialization.py carries."""
    if count() == 1:
        return [value]
    own = np.frombuffer(serialization.write(value), np.uint8)
    [sizes] = _stacked(np.asarray([len(own)], np.int32)).T
    padded = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)  # few lengths, few programs
    padded[: len(own)] = own
    return [serialization.read(row[:size].tobytes()) for row, size in zip(_stacked(padded), sizes, strict=True)]


def _stacked(own: np.ndarray) -> np.ndarray:
    """[processes, ...] of arrays of the same shape."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.asarray(devices).reshape(count(), -1), ("process", "device"))
    place = NamedSharding(mesh, PartitionSpec("process"))
    return _everywhere(jax.make_array_from_callback((count(), *own.shape), place, lambda _: own[None]))


def broadcast(value: Any) -> Any:
    """The value of process 0."""
    return all_gather_object(value if first() else None)[0]
