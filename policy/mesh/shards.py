"""Arrays on a mesh that are made in host memory, one shard at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Shard:
    """A part of an array that devices of this process hold. index: where it lies in the array.
    devices: those that hold it."""

    index: tuple[slice, ...]
    devices: tuple[Any, ...]

    def empty(self, dtype: DTypeLike) -> np.ndarray:
        """Returns an array for the numbers of the shard. It starts at a multiple of 64 bytes, which
        jax uses on CPU without a copy."""
        shape = [part.stop - part.start for part in self.index]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        raw = np.empty(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + size].view(dtype).reshape(shape)

    def put(self, numbers: np.ndarray, sharding: NamedSharding) -> list[jax.Array]:
        """Copies the numbers to each of the devices, into the memory of `sharding`."""
        kind = sharding.memory_kind
        places = [SingleDeviceSharding(device, memory_kind=kind) for device in self.devices]
        return jax.block_until_ready([jax.device_put(numbers, place) for place in places])


def shards_of(shape: tuple[int, ...], sharding: NamedSharding) -> list[Shard]:
    """Returns the shards of an array that this process holds, each once."""
    devices: dict[tuple, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [
        Shard(tuple(slice(*each) for each in bounds), tuple(holders))
        for bounds, holders in devices.items()
    ]


def assembled(
    shape: tuple[int, ...], sharding: NamedSharding, arrays: Iterable[jax.Array]
) -> jax.Array:
    """Returns the array that has these as its shards, one for each device of this process."""
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))
