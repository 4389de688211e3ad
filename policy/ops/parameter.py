"""Declarations of weights: one line gives the shape, the logical axes and the initial value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


class Constant(nnx.Variable):
    """A stored array that is not trained; always of dtype `kind`, whatever the dtype of the
    weights."""

    kind = "float32"


class IntegerConstant(Constant):
    """A stored array of integers that is not trained."""

    kind = "int32"


class RouterBias(Constant):
    """A selection bias of a router, updated by a rule of its own."""


class RowTable(nnx.Param):
    """A trained table that may live in host memory, since a call reads only a few of its rows
    (Runtime.table_memory)."""


def normal(std: float) -> Initializer:
    """Creates an initializer that draws from a normal distribution with this standard deviation."""
    return jax.nn.initializers.normal(std)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def stacked(create: Callable[[nnx.Rngs], ModuleT], rngs: nnx.Rngs, repeats: int) -> ModuleT:
    """Creates one module from `repeats` calls of `create(rngs)`, each with a random key of its own;
    weights are stacked along a new axis named "layers"."""

    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def each(rngs):
        return create(rngs)

    module = each(rngs)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and node.get_metadata("out_sharding", None) == ():
            node.set_metadata(
                out_sharding=("layers",)
            )  # of a number without axes, which flax passes over
    return module


def split_module(
    module: nnx.Module,
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], nnx.Module]]:
    """Returns (the arrays of a module, a function that rebuilds the module from such arrays), to
    pass the arrays to a function as arguments."""
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return arrays, lambda arrays: nnx.merge(graph, tree.unflatten(arrays))


class MatrixDims(NamedTuple):
    """The dimensions of a weight that products read.

    rows: those that a product sums over. columns: those that it gives. All other dimensions count
    matrices: of layers, of experts, of groups with inputs of their own.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Callable[..., jax.Array],
    kind: type[nnx.Param] = nnx.Param,
    inputs: tuple[int, ...] | None = None,
    counts: tuple[int, ...] = (),
    quantizable: bool = True,
) -> nnx.Param:
    """Creates a trained float32 array of `shape` whose dimension i has the logical axis name
    `axes[i]`.

    inputs: the dimensions that its products sum over; None: it is a vector, a table of embeddings
    or the kernel of a convolution. counts: the dimensions that count matrices, such as the experts.
    quantizable: whether its products may read it quantised; they then go through
    policy/ops/linear.py. Raises ValueError if `shape` and `axes` differ in length.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    matrix = None
    if inputs is not None:
        outputs = (dim for dim in range(len(shape)) if dim not in inputs + counts)
        matrix = MatrixDims(inputs, tuple(outputs))
    array = init(rngs.params(), shape, jnp.float32)
    return kind(array, out_sharding=axes, matrix=matrix, quantizable=quantizable)
