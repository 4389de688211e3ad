"""A copy of the policy's weights for rollouts, quantised or laid out for decoding or both, where one is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import qwix

from policy.config import StoredType
from policy.execution.compiled_cache import Memory
from policy.mesh.host_memory import fetch, on_a_device
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.model import Graph
from policy.ops.quantization import TYPES, quantize

if TYPE_CHECKING:
    from rollout.types import GeneratorOptions


class RolloutWeights:
    """A view of a policy's weights. With `kind` those of `graph.inputs` are values of 8 or 4 bits, one scale for each output
    channel (of each expert); with `rules` those that these rules put elsewhere lie there, and what nothing but products read is in
    the dtype of these. The others are the policy's own arrays.

    The view belongs to the arrays that it was made from: asked for others, it is made again, by one compiled program that writes
    into the buffers of the copy it had.
    """

    def __init__(self, graph: Graph, kind: StoredType | None, rules: Mapping[str, Sequence[str]] | None = None):
        """Raises ValueError for a rule that names no mesh axis."""
        self.graph, self.moves = graph, rules is not None
        self.layout, self._qtype = graph.for_inference(rules).layout, TYPES[kind] if kind else None
        self.paths = tuple(path for path in graph.paths if (kind and path in graph.inputs) or self._elsewhere(path))
        self._program = jax.jit(self._make, donate_argnums=1, keep_unused=True)
        self._first, self.memory = None, None
        self.drop()

    @classmethod
    def wanted(cls, graph: Graph, options: GeneratorOptions) -> RolloutWeights | None:
        """Those that these options ask for; None: the policy's own arrays are read."""
        if options.weights is None and options.rules is None:
            return None
        return cls(graph, options.weights, options.rules)

    def of(self, params: dict[str, jax.Array]) -> dict[str, jax.Array | qwix.QArray]:
        """`params` with the copies in the place of what they were made from."""
        given = {path: params[path] for path in self.paths}
        if any(path not in self._sources or self._sources[path]() is not array for path, array in given.items()):
            old = self._copies
            self.drop()
            program = self._first if self._first is not None and old is None else self._program
            self._copies = block_on_cpu_mesh(program(given, old), self.graph.layout)
            self._sources = {path: weakref.ref(array) for path, array in given.items()}
        return params | (self._copies or {})

    def drop(self) -> None:
        """Gives up the copies."""
        self._sources: dict[str, weakref.ref] = {}
        self._copies: dict[str, jax.Array | qwix.QArray] | None = None

    def compile_ahead(self, params: dict[str, jax.Array]) -> None:
        """Compiles the program that makes the copies where there are none. `memory` then says what it takes."""
        if not self.paths:
            return
        self._first = self.lower(params, again=False).compile()
        self.memory = Memory.of(self._first, self.layout.platform)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct | qwix.QArray]:
        """Shapes and places of the copies."""
        shapes = jax.eval_shape(self._make, {path: self.graph.shapes[path] for path in self.paths}, None)
        return {
            path: jax.tree.map(_abstract, array, self._places(path, array, self.layout))
            for path, array in shapes.items()
        }

    @property
    def bytes(self) -> int:
        """Of the copies, on each device."""
        return on_a_device(self.abstract)

    def lower(self, params: dict, *, again: bool) -> jax.stages.Lowered:
        """The program that makes the copies of these weights; `again`: in the place of earlier ones."""
        return self._program.lower({path: params[path] for path in self.paths}, self.abstract if again else None)

    def _elsewhere(self, path: str) -> bool:
        """Whether the rules of rollouts put a weight elsewhere. Tables in host memory stay where they are."""
        axes, shape = self.graph.axes[path], self.graph.shapes[path].shape
        places = [layout.sharding(axes, shape) for layout in (self.graph.layout, self.layout)]
        return path not in self.graph.tables and not places[0].is_equivalent_to(places[1], len(shape))

    def _make(self, given: dict[str, jax.Array], old) -> dict[str, jax.Array | qwix.QArray]:
        """`old` is only given up: its buffers are those of the result."""
        made = {}
        for path, array in given.items():
            array = fetch(array)
            if self._qtype is not None and path in self.graph.inputs:
                array = quantize(array, self._qtype, self.graph.inputs[path])
            else:
                array = self.graph.as_multiplied({path: array})[path]
            if self.layout is not self.graph.layout:  # what is sent is what was made: few bits
                array = self._placed(path, array, self.graph.layout)
            made[path] = self._placed(path, array, self.layout)
        return made

    def _placed(self, path: str, array, layout: Layout):
        return jax.lax.with_sharding_constraint(array, self._places(path, array, layout))

    def _places(self, path: str, array, layout: Layout):
        """Values lie where their weight does; a scale has length 1, and so no axis, where the weight's products sum."""
        axes, place = self.graph.axes[path], layout.sharding
        if not isinstance(array, qwix.QArray):
            return place(axes, array.shape)
        axes_of_scale = tuple(None if dim in self.graph.inputs[path] else axis for dim, axis in enumerate(axes))
        return replace(array, qvalue=place(axes, array.qvalue.shape), scale=place(axes_of_scale, array.scale.shape))


def _abstract(array, place) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
