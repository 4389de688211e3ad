"""Weights of products that nothing trains, stored quantised (`Runtime.base_weights`): their shapes
on the mesh, and the programs that make them of floats.

A stacked weight is made one layer at a time, so that its floats never exist together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
import qwix
from jax.sharding import NamedSharding, PartitionSpec

from policy import compatibility
from policy.compatibility import Conflict
from policy.config import Runtime, WeightType
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.mesh.shards import assembled, shards_of
from policy.ops.host_memory import fetch, in_host_memory
from policy.ops.quantization import quantize_blocks


def check(runtime: Runtime) -> None:
    """Raises Conflict if products cannot read weights that are stored quantised."""
    if runtime.base_weights is None:
        return
    stored = "weights that are stored quantised (base_weights)"
    if runtime.quantization is not None:
        raise Conflict(
            f"{compatibility.FEW_BITS} does not go with {stored}: products multiply their floats"
        )
    if runtime.layout is not None and runtime.layout.explicit:
        raise Conflict(
            f"{compatibility.EXPLICIT} does not go with {stored}: their arrays declare no "
            "shardings; use auto"
        )


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is stored as values of `kind`, with a scale for each block of numbers.

    shape, dtype, axes: of its floats. inputs, block: as for `quantize_blocks`. hosted: the values
    live in host memory. The scales are small and stay on the device.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    inputs: tuple[int, ...]
    kind: WeightType
    block: int | None
    layout: Layout
    hosted: bool = False

    @property
    def abstract(self) -> qwix.QArray:
        """Returns the shapes, dtypes and shardings of its arrays."""
        return jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            self._shapes,
            self.shardings,
        )

    @property
    def shardings(self) -> qwix.QArray:
        """Returns the shardings of its arrays."""
        shardings = quantized_shardings(self.layout, self.axes, self._shapes)
        if not self.hosted:
            return shardings
        return replace(shardings, qvalue=in_host_memory(cast(Any, shardings.qvalue)))

    @property
    def _shapes(self) -> qwix.QArray:
        return jax.eval_shape(self.quantize, jax.ShapeDtypeStruct(self.shape, self.dtype))

    @property
    def layer_sharding(self) -> NamedSharding:
        """Returns the sharding of the floats of one layer of a stack."""
        return _of_layer(self.layout.sharding(self.axes, self.shape))

    def quantize(self, array: jax.Array) -> qwix.QArray:
        """Quantises the floats of the weight, inside a program."""
        return quantize_blocks(fetch(array), self.kind, self.inputs, self.block)

    def of(self, array: jax.Array) -> qwix.QArray:
        """Quantises the floats of the weight, which the caller may then drop."""
        return block_on_cpu_mesh(_program(self)(array), self.layout)

    def of_layers(self, layers: dict[int, Callable[[], jax.Array]], start: Any) -> qwix.QArray:
        """Quantises layers of a stack one after the other.

        layers: number in the stack -> function that returns its floats. start: the weight with the
        other layers; None: there are none.
        """
        leaves, structure = jax.tree.flatten(self.abstract)
        stacks = [_Stack(leaf) for leaf in leaves]
        if start is not None:
            for stack, array in zip(stacks, jax.tree.leaves(start), strict=True):
                stack.copy(array)
        for number, read in layers.items():
            layer = block_on_cpu_mesh(_layer_program(self)(read()), self.layout)
            for stack, array in zip(stacks, jax.tree.leaves(layer), strict=True):
                stack.copy(array, number)
        return structure.unflatten([stack.on_mesh() for stack in stacks])


class _Stack:
    """An array with an axis of layers whose shards are filled in host memory, where 4-bit numbers
    take a byte. On CPU this memory becomes that of the array."""

    def __init__(self, abstract: jax.ShapeDtypeStruct):
        self._abstract = abstract
        self._sharding = cast(NamedSharding, abstract.sharding)
        self._shards = shards_of(abstract.shape, self._sharding)
        self._numbers = [shard.empty(abstract.dtype) for shard in self._shards]

    def copy(self, array: jax.Array, layer: int | None = None) -> None:
        """Copies the shards of an array that is sharded as the stack, or as one layer of it."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        for shard, numbers in zip(self._shards, self._numbers, strict=True):
            numbers[... if layer is None else layer] = np.asarray(by_device[shard.devices[0]])

    def on_mesh(self) -> jax.Array:
        """Returns the array."""
        arrays = []
        for shard, numbers in zip(self._shards, self._numbers, strict=True):
            arrays += shard.put(numbers, self._sharding)
        return assembled(self._abstract.shape, self._sharding, arrays)


def quantized_shardings(
    layout: Layout, axes: tuple[str | None, ...], weight: qwix.QArray
) -> qwix.QArray:
    """Returns the shardings of a quantised weight, which may be abstract: values are sharded as its
    floats, scales as far as their number allows."""
    scales = weight.scale.shape
    scale_axes = tuple(None if n == 1 else axis for n, axis in zip(scales, axes, strict=True))
    return replace(
        weight,
        qvalue=cast(Any, layout.sharding(axes, weight.qvalue.shape)),
        scale=cast(Any, layout.sharding(scale_axes, scales)),
    )


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one layer, in device memory, of an array with this sharding."""
    layers, *others = sharding.spec
    assert layers is None, "a mesh does not cut the axis of layers"
    return NamedSharding(sharding.mesh, PartitionSpec(*others))


# Weights of one shape share their programs.
@lru_cache(maxsize=256)
def _program(weight: QuantizedWeight) -> Callable[[jax.Array], qwix.QArray]:
    return jax.jit(weight.quantize, out_shardings=weight.shardings)


@lru_cache(maxsize=256)
def _layer_program(weight: QuantizedWeight) -> Callable[[jax.Array], qwix.QArray]:
    """Returns the program that quantises the floats of one layer."""
    inputs = tuple(dim - 1 for dim in weight.inputs)

    def quantize(layer: jax.Array) -> qwix.QArray:
        return quantize_blocks(layer, weight.kind, inputs, weight.block)

    return jax.jit(quantize, out_shardings=jax.tree.map(_of_layer, weight.shardings))
