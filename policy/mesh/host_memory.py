"""Arrays that live in host memory: they come to the device when they are needed, a layer at a time, or are computed on where they
are."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import compute_on
from jax.sharding import NamedSharding

from policy.config import Runtime
from policy.mesh import processes
from policy.ops.parameter import RowTable

HOST = "pinned_host"
# Its name before jax 0.12, where `compute_on` was another function.
_compute_on = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
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
    # Of several processes each sees the memory of its own devices only.
    device = sharding.mesh.devices.flat[0] if processes.count() == 1 else sharding.mesh.local_devices[0]
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
    return jax.tree.map(
        lambda a: jax.device_put(a, Space.Device) if jax.typeof(a).memory_space == Space.Host else a, tree
    )


def fetch_layer(weights, runtime: Runtime):
    """The same for the weights of a layer: a table that `table_memory` keeps in host memory stays there."""

    def stays(variable) -> bool:
        return runtime.table_memory == "host" and isinstance(variable, RowTable)

    def is_variable(node) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree.map(lambda v: v if stays(v) else fetch(v), weights, is_leaf=is_variable)


def put_back(tree, like):
    """`tree`, each array in the memory of its counterpart in `like`."""
    return jax.tree.map(
        lambda a, b: jax.device_put(a, Space.Host) if jax.typeof(b).memory_space == Space.Host else a, tree, like
    )


def to_device(tree):
    """The arrays in device memory."""
    return jax.device_put(tree, Space.Device)


def to_host(tree):
    """The arrays in host memory."""
    return jax.device_put(tree, Space.Host)


def on_a_device(tree) -> int:
    """Bytes of arrays, which may be abstract, in the memory of each device; those in host memory count nothing."""

    def size(array) -> int:
        place = array.sharding
        if place is not None and getattr(place, "memory_kind", None) == HOST:
            return 0
        shape = array.shape if place is None else place.shard_shape(array.shape)
        return math.ceil(math.prod(shape) * (0.5 if array.dtype == jnp.int4 else array.dtype.itemsize))

    return sum(map(size, jax.tree.leaves(tree)))


def on_host(function, *trees):
    """function(*trees), computed by the host, in the middle of a program on a TPU: only arguments and results move. The arguments
    are brought there if need be, and the result stays there."""
    return _compute_on(function, compute_type="device_host", out_memory_spaces=Space.Host)(*to_host(trees))
