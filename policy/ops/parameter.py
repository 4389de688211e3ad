"""How a weight is declared: one line gives its shape, its logical axes and its first value."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


class Constant(nnx.Variable):
    """A stored number that no gradient moves; always of `kind`, whatever the weights are stored in."""

    kind = "float32"


class IntegerConstant(Constant):
    """The same for whole numbers."""

    kind = "int32"


class RouterBias(Constant):
    """A selection bias of a router: moved by a rule of its own."""


class RowTable(nnx.Param):
    """A trained table of which a call reads a few rows, so that it may live in host memory (Runtime.table_memory)."""


def normal(std: float):
    return jax.nn.initializers.normal(std)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def stacked(create, rngs: nnx.Rngs, repeats: int):
    """The modules that `create(rngs)` makes with a random key each, in one, their weights stacked along a new axis named
    "layers"."""

    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def each(rngs):
        return create(rngs)

    return each(rngs)


def split_module(module: nnx.Module) -> tuple[list[jax.Array], Callable[[list[jax.Array]], nnx.Module]]:
    """(the arrays of a module, what makes the module of such arrays): to hand them to a function by argument."""
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return arrays, lambda arrays: nnx.merge(graph, tree.unflatten(arrays))


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init,
    kind: type[nnx.Param] = nnx.Param,
    inputs: tuple[int, ...] | None = None,
) -> nnx.Param:
    """A trained array of `shape` whose dimension i carries the logical axis name `axes[i]`; float32 until it is placed. `inputs`
    are the dimensions that its products sum over, where they go through policy/ops/linear.py: such a weight may be
    quantised."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return kind(init(rngs.params(), shape, jnp.float32), out_sharding=axes, inputs=inputs)
