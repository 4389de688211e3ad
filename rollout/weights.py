"""Quantised weights for rollouts: made from the policy's own, and made again in their place when those have changed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import jax
import qwix

from policy.layers.quantization import TYPES, quantize
from policy.memory import fetch
from policy.model import Graph
from policy.sharding import settle


class QuantizedWeights:
    """A view of a policy's weights with those of `graph.inputs` as values of 8 or 4 bits, one scale for each output channel (of
    each expert). The other weights are the policy's own arrays.

    The view belongs to the arrays that it was made from: asked for others, it is made again, by one compiled program that writes
    into the buffers of the values and scales it had.
    """

    def __init__(self, graph: Graph, kind: str):
        self.graph = graph
        self._program = jax.jit(partial(self._quantize, TYPES[kind]), donate_argnums=1, keep_unused=True)
        self._sources: dict[str, weakref.ref] = {}
        self._quantized: dict[str, qwix.QArray] | None = None

    def of(self, params: dict[str, jax.Array]) -> dict[str, jax.Array | qwix.QArray]:
        """`params` with quantised weights in the place of those that have a quantised form."""
        floats = {path: params[path] for path in self.graph.inputs}
        if not self._sources or any(self._sources[path]() is not array for path, array in floats.items()):
            old, self._quantized, self._sources = self._quantized, None, {}
            self._quantized = settle(self._program(floats, old), self.graph.layout)
            self._sources = {path: weakref.ref(array) for path, array in floats.items()}
        return params | self._quantized

    @property
    def abstract(self) -> dict[str, qwix.QArray]:
        """Shapes and places of the quantised weights."""
        shapes = jax.eval_shape(self._program, {path: self.graph.shapes[path] for path in self.graph.inputs}, None)
        return {path: jax.tree.map(_abstract, array, self._places(path, array)) for path, array in shapes.items()}

    def lower(self, floats: dict) -> jax.stages.Lowered:
        """The program that makes them, again, of these weights."""
        return self._program.lower({path: floats[path] for path in self.graph.inputs}, self.abstract)

    def _quantize(self, qtype, floats: dict[str, jax.Array], old) -> dict[str, qwix.QArray]:
        """`old` is only given up: its buffers are those of the result."""
        return {path: self._placed(path, quantize(fetch(array), qtype, self.graph.inputs[path])) for path, array in floats.items()}

    def _placed(self, path: str, array: qwix.QArray) -> qwix.QArray:
        return jax.lax.with_sharding_constraint(array, self._places(path, array))

    def _places(self, path: str, array: qwix.QArray) -> qwix.QArray:
        """Values lie where their weight does; a scale has length 1, and so no axis, where the weight's products sum."""
        axes, place = self.graph.axes[path], self.graph.layout.sharding
        axes_of_scale = tuple(None if dim in self.graph.inputs[path] else axis for dim, axis in enumerate(axes))
        return replace(array, qvalue=place(axes, array.qvalue.shape), scale=place(axes_of_scale, array.scale.shape))


def _abstract(array, place) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
