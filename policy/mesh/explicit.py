"""Shardings as parts of types: helpers for code that is traced while the axes of the mesh are
`Explicit`.

Arrays of a run live on a mesh whose axes are `Auto`, whatever `mesh.shard_mode` is. Under
`explicit` a decoder that is called without a cache is traced in another view of that mesh, with the
same devices in the same order, whose axes are `Explicit` (`with_explicit_axes`). There the type of
every array has a sharding, an operation whose result could be sharded in two ways is an error, and
data moves between devices only at a `reshard`, an `out_sharding` or a `shard_map`. Entering and
leaving the view moves no data.

Computations of a device on its own rows and heads run in `over_devices`. The few operations that no
sharding rule of jax covers (sorts, random bits) are left to the partitioner, between inputs and
outputs of known sharding (`auto_axes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

Specs: TypeAlias = "PartitionSpec | Sequence[Specs] | Mapping[str, Specs] | None"
"""The shardings of a tree of arrays, or of a prefix of it."""


def in_explicit_mode() -> bool:
    """Tells whether the axes of the current mesh are Explicit, so that types have shardings."""
    return set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Explicit}


def spec_of(x: jax.Array) -> PartitionSpec:
    """Returns the PartitionSpec in the type of an array."""
    return jax.typeof(x).sharding.spec


def with_explicit_axes(function: Callable, mesh: Mesh, specs: Specs) -> Callable:
    """Returns `function` traced with the axes of `mesh` Explicit. Its results are arrays of the
    caller's view.

    specs: the PartitionSpecs of the arguments, or a prefix of their tree.
    """

    def run(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.explicit_axes(function, in_sharding=specs)(*arguments)

    return run


def over_devices(
    function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Specs, **options: Any
) -> Callable:
    """Returns `jax.shard_map` of `function` over the mesh (in explicit mode: the mesh of the
    types).

    In explicit mode, arguments with another sharding than `in_specs` are resharded first.
    """
    if not in_explicit_mode():
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **options)
    return lambda *arguments: mapped(*jax.reshard(arguments, in_specs))


def auto_axes(function: Callable, out_specs: Specs, *arguments: Any) -> Any:
    """Returns function(*arguments), computed with shardings of the partitioner; the results are
    sharded by `out_specs`.

    `function` must not close over arrays. Outside of explicit mode this is a plain call.
    """
    if not in_explicit_mode():
        return function(*arguments)
    return jax.sharding.auto_axes(function, out_sharding=out_specs)(*arguments)


def reshard_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshards x like `other`, an array with as many dimensions. Outside of explicit mode x is
    returned unchanged."""
    return jax.reshard(x, spec_of(other)) if in_explicit_mode() else x
