"""Shardings as parts of types: what is needed by code that is traced while the axes of the mesh are `Explicit`.

Arrays of a run lie on a mesh whose axes are `Auto`, whatever `mesh.shard_mode` is. Under `explicit` a decoder that is called
without a cache is traced in another view of that mesh, with the same devices in the same places, whose axes are `Explicit`
(`with_explicit_axes`): there every array says how it is cut, an operation whose result could be cut in two ways is an error, and data moves
between devices where a `reshard`, an `out_sharding` or a `shard_map` says so. To enter the view and to leave it moves nothing.

What a device can do alone with its own rows and heads runs by itself (`over_devices`). The few operations that no rule of jax
covers (sorts, random bits) are left to the partitioner between a stated input and a stated output (`auto_axes`).
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec


def in_explicit_mode() -> bool:
    """Whether what is traced now has its shardings in its types."""
    return set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Explicit}


def spec_of(x: jax.Array) -> PartitionSpec:
    """How an array is cut, by its type."""
    return jax.typeof(x).sharding.spec


def with_explicit_axes(function, mesh: Mesh, places):
    """`function`, traced with the axes of `mesh` Explicit. `places` are the PartitionSpecs of its arguments, or a prefix of their
    tree; its results are handed back as arrays of the caller's view."""

    def run(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.explicit_axes(function, in_sharding=places)(*arguments)

    return run


def over_devices(function, mesh: Mesh | None, in_specs, out_specs, **how):
    """`jax.shard_map` over the mesh (in explicit mode: the mesh of the types); arguments that are cut in another way than
    `in_specs` says are resharded first."""
    if not in_explicit_mode():
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **how)
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **how)
    return lambda *arguments: mapped(*jax.reshard(arguments, in_specs))


def auto_axes(function, out_specs, *arguments):
    """function(*arguments), within which the partitioner decides; the results are cut as `out_specs` says. Arrays that `function`
    takes from elsewhere than its arguments are errors. Plainly the function where shardings are not stated."""
    if not in_explicit_mode():
        return function(*arguments)
    return jax.sharding.auto_axes(function, out_sharding=out_specs)(*arguments)


def reshard_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """x, cut as `other` is, an array of as many dimensions; unchanged where shardings are not stated."""
    return jax.reshard(x, spec_of(other)) if in_explicit_mode() else x
