"""Arrays in host memory: they are copied to the device a layer at a time, or the host computes with
them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding

from policy.config import Runtime
from policy.mesh import processes
from policy.ops.parameter import RowTable

HOST = "pinned_host"
# `compute_on2` is the name before jax 0.12, where `compute_on` was another function.
_compute_on: Callable[..., Any] = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
Space = jax.memory.Space


class NoHostMemory(ValueError):
    """The devices cannot reach arrays in host memory."""


def belongs_there(axes: tuple[str | None, ...]) -> bool:
    """Tells whether an array with these logical axes should be offloaded to host memory: matrices
    should.

    Norms and biases are small, and TPUs cannot slice one row out of a stack of them there, because
    rows are stored eight at a time.
    """
    return len([axis for axis in axes if axis != "layers"]) > 1


TreeT = TypeVar("TreeT")


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the memory of the devices' hosts.

    Raises NoHostMemory where the platform has no host memory that programs can read.
    """
    mesh = cast(Mesh, sharding.mesh)
    # Each process sees the memory of its own devices only.
    device = mesh.devices.flat[0] if processes.count() == 1 else mesh.local_devices[0]
    if not any(memory.kind == HOST for memory in device.addressable_memories()):
        raise NoHostMemory(
            f"{device.platform} devices have no {HOST} memory, so nothing can be kept there: set "
            "model.host_parameters and optimizer.host_memory to false, and model.remat to a "
            "policy that offloads nothing"
        )
    return sharding.with_memory_kind(HOST)


def fetch(tree: TreeT) -> TreeT:
    """Copies arrays in host memory to device memory, inside a jitted function. Gradients return to
    the memory of the arrays.

    Under jax.checkpoint the copy is not stored: the backward pass makes it again.
    """
    return jax.tree.map(
        lambda a: (
            jax.device_put(a, Space.Device) if jax.typeof(a).memory_space == Space.Host else a
        ),
        tree,
    )


def lies_on_host(array: jax.Array) -> bool:
    """Tells whether an array lies in host memory."""
    return jax.typeof(array).memory_space == Space.Host


def fetch_layer(weights: TreeT, runtime: Runtime) -> TreeT:
    """Fetches the weights of a layer, except a table that `table_memory` keeps in host memory."""

    def stays(variable) -> bool:
        return runtime.table_memory == "host" and isinstance(variable, RowTable)

    def is_variable(node) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree.map(lambda v: v if stays(v) else fetch(v), weights, is_leaf=is_variable)


def put_back(tree: TreeT, like: TreeT) -> TreeT:
    """Moves each array to the memory of its counterpart in `like`."""
    return jax.tree.map(
        lambda a, b: (
            jax.device_put(a, Space.Host) if jax.typeof(b).memory_space == Space.Host else a
        ),
        tree,
        like,
    )


def to_device(tree: TreeT) -> TreeT:
    """Moves the arrays to device memory."""
    return jax.device_put(tree, Space.Device)


def to_host(tree: TreeT) -> TreeT:
    """Moves the arrays to host memory."""
    return jax.device_put(tree, Space.Host)


def on_a_device(tree: object) -> int:
    """Counts the bytes of arrays, which may be abstract, in the memory of each device.

    Arrays in host memory count nothing.
    """

    def is_hosted(array) -> bool:
        return getattr(array.sharding, "memory_kind", None) == HOST

    return sum(shard_bytes(array) for array in jax.tree.leaves(tree) if not is_hosted(array))


def shard_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Counts the bytes of a shard of an array, which may be abstract, in any memory."""
    place = array.sharding
    shape = array.shape if place is None else place.shard_shape(array.shape)
    size = 0.5 if array.dtype in (jnp.int4, jnp.uint4) else array.dtype.itemsize
    return math.ceil(math.prod(shape) * size)


def on_host(function: Callable, *trees: Any) -> Any:
    """Returns function(*trees), computed by the host inside a program on a TPU: only arguments and
    results move.

    Arguments are copied to host memory if needed, and the result stays there.
    """
    return _compute_on(function, compute_type="device_host", out_memory_spaces=Space.Host)(
        *to_host(trees)
    )
