"""Arrays that live in host memory and come to the device when they are needed, a layer at a time."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

HOST = "pinned_host"
Space = jax.memory.Space


class NoHostMemory(ValueError):
    """The devices cannot reach arrays in host memory."""


def belongs_there(axes: tuple[str | None, ...]) -> bool:
    """Whether an array with these logical axes is worth a place in host memory: matrices are. Norms and biases are little, and TPUs
    cannot cut one row out of a stack of them there, because rows are stored eight at a time."""
    return len([axis for axis in axes if axis != "layers"]) > 1


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same pieces on the same devices, in the memory of their hosts.

    Raises NoHostMemory where the platform has none that programs can read.
    """
    device = sharding.mesh.devices.flat[0]
    if not any(memory.kind == HOST for memory in device.addressable_memories()):
        raise NoHostMemory(
            f"{device.platform} devices have no {HOST} memory, so nothing can be kept there: set model.host_parameters and "
            "optimizer.host_memory to false, and model.remat to a policy that offloads nothing"
        )
    return sharding.with_memory_kind(HOST)


def fetch(tree):
    """The arrays, those in host memory copied to device memory. In a jitted function; its gradient goes back to where they were.

    Inside a function under jax.checkpoint the copy is made again for the backward pass, and not kept until then.
    """
    return jax.tree.map(lambda a: jax.device_put(a, Space.Device) if jax.typeof(a).memory_space == Space.Host else a, tree)


def put_back(tree, like):
    """`tree`, each array in the memory of its counterpart in `like`."""
    return jax.tree.map(lambda a, b: jax.device_put(a, Space.Host) if jax.typeof(b).memory_space == Space.Host else a, tree, like)
