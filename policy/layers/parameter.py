"""How a weight is declared: one line gives its shape, its logical axes and its first value."""

from __future__ import annotations

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


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], init, kind=nnx.Param) -> nnx.Param:
    """A trained array of `shape` whose dimension i carries the logical axis name `axes[i]`; float32 until it is placed."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return kind(init(rngs.params(), shape, jnp.float32), out_sharding=axes)
