"""A weight inside a scan over layers that is still stacked: all layers of it, and the number of
one.

A kernel on TPU reads the layer where it lies. A slice in front of a kernel is a copy: it reads the
layer, writes it, and the kernel reads it again. Every other product takes `one`, the slice.

R repeats of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeVar

import jax
from flax import nnx

from policy.ops.adapted import Adapted

TreeT = TypeVar("TreeT")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedWeight:
    """The weight of layer number `layer` of a stack. array: [R, ...], of all layers. layer:
    int32[].

    own: the slice of the layer, which the scan makes; None: it is made where it is asked for. What
    is not read is not computed.
    """

    array: Any
    layer: Any
    own: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight of one layer."""
        return self.array.shape[1:]

    @property
    def dtype(self) -> Any:
        """Returns the dtype of the numbers."""
        return self.array.dtype

    @property
    def one(self) -> jax.Array:
        """Returns the weight of the layer, a slice."""
        if self.own is not None:
            return self.own
        return jax.lax.dynamic_index_in_dim(self.array, self.layer, axis=0, keepdims=False)

    def __getitem__(self, key: EllipsisType) -> StackedWeight:
        """Returns itself for `[...]`, as modules read their weights."""
        assert key is Ellipsis, "a stacked weight is not indexed"
        return self


def unstacked(weights: TreeT) -> TreeT:
    """Replaces every stacked weight of a tree by the slice of its layer."""

    def is_stacked(node) -> bool:
        return isinstance(node, StackedWeight)

    return jax.tree.map(
        lambda node: node.one if is_stacked(node) else node, weights, is_leaf=is_stacked
    )


def in_place(weight: TreeT) -> TreeT:
    """Returns a weight without the slice that the scan makes of a stacked one, where a choice
    follows: a branch that does not read the slice must not wait for it."""
    return replace(weight, own=None) if isinstance(weight, StackedWeight) else weight


def keep_stacked(
    of_layer: TreeT, stack: TreeT, layer: jax.Array, chosen: Callable[[nnx.Variable], bool]
) -> TreeT:
    """Returns the variables of one layer, those that are `chosen` stacked. stack: the variables of
    all layers."""

    def replaced(own, full):
        return full.replace(stacked(own.get_value(), full.get_value())) if chosen(full) else own

    def stacked(own, full):
        if isinstance(own, Adapted):
            return replace(own, base=stacked(own.base, full.base))
        return StackedWeight(full, layer, own)

    def is_variable(node) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree.map(replaced, of_layer, stack, is_leaf=is_variable)
