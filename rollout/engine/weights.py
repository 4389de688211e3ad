"""A copy of the policy's weights for rollouts: quantised, resharded for decoding, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import qwix

from policy.config import StoredType
from policy.execution.array_identity import ArrayIdentity
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.model import Graph
from policy.ops.host_memory import fetch, on_a_device
from policy.ops.quantization import TYPES, quantize
from policy.programs.compiled_cache import CompiledCache, Memory
from policy.programs.quantized_weights import quantized_shardings
from rollout.types import GeneratorOptions


class RolloutWeights:
    """The weights that the generator computes with: some are copies, the others are the policy's
    own arrays.

    With `kind` the weights of `graph.inputs` are copied as values of 8 or 4 bits, with one scale
    for each output channel (of each expert). With `rules` the weights whose sharding these rules
    change are copied to that sharding; those that only products read get the dtype of the products.

    The copies are made again when the policy has other arrays. One compiled program makes them, in
    the buffers of the old copies.

    paths: the paths of the copied weights. reshards: whether there are rules.
    """

    def __init__(
        self,
        graph: Graph,
        kind: StoredType | None,
        rules: Mapping[str, Sequence[str]] | None = None,
    ):
        """Raises ValueError for a rule that names no mesh axis."""
        self.graph = graph
        self.reshards = rules is not None
        self.layout = graph.for_inference(rules).layout
        self._qtype = TYPES[kind] if kind else None
        self.paths = tuple(
            path
            for path in graph.paths
            if (kind and path in graph.inputs) or self._is_resharded(path)
        )
        program = jax.jit(self._make, donate_argnums=1, keep_unused=True)
        self._program = CompiledCache(program, self.layout.platform, shape_of=_shape_of)
        self.release()

    @classmethod
    def from_options(cls, graph: Graph, options: GeneratorOptions) -> RolloutWeights | None:
        """Returns the weights that these options ask for; None: the policy's own arrays."""
        if options.weights is None and options.rules is None:
            return None
        return cls(graph, options.weights, options.rules)

    def with_copies(self, params: dict[str, jax.Array]) -> dict[str, jax.Array | qwix.QArray]:
        """Returns `params` with the copies instead of their originals. Makes the copies if they are
        not up to date."""
        originals = {path: params[path] for path in self.paths}
        if self._identity.update(originals.values()):
            old = self._copies
            self.release()
            self._copies = block_on_cpu_mesh(self._program(originals, old), self.graph.layout)
            self._identity.update(originals.values())  # not before all are copied
        return params | (self._copies or {})

    def release(self) -> None:
        """Drops the copies of the weights for rollouts; the next use makes them again."""
        self._identity = ArrayIdentity()
        self._copies: dict[str, jax.Array | qwix.QArray] | None = None

    def compile_ahead(self, params: dict[str, jax.Array]) -> None:
        """Compiles the program that makes the first copies."""
        if self.paths:
            self._program.compile({path: params[path] for path in self.paths}, None)

    @property
    def memory(self) -> Memory | None:
        """Returns the memory of the program that makes copies to another sharding where there are
        none; None: it is not compiled.
        """
        return self._program.memory.get((len(self.paths), 0)) if self.reshards else None

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct | qwix.QArray]:
        """Returns the shapes and shardings of the copies."""
        stored = self.graph.shapes | {
            path: self.graph.quantized_weight(path).abstract for path in self.graph.quantized
        }
        shapes = jax.eval_shape(self._make, {path: stored[path] for path in self.paths}, None)
        return {
            path: jax.tree.map(_abstract, array, self._shardings(path, array, self.layout))
            for path, array in shapes.items()
        }

    @property
    def bytes(self) -> int:
        """Returns the bytes of the copies, per device."""
        return on_a_device(self.abstract)

    def lower(self, params: dict, *, again: bool) -> jax.stages.Lowered:
        """Traces the program that makes the copies of these weights. again: in the buffers of
        earlier copies."""
        return self._program.lower(
            {path: params[path] for path in self.paths}, self.abstract if again else None
        )

    def _is_resharded(self, path: str) -> bool:
        """Whether the rules of rollouts change the sharding of a weight. Tables in host memory stay
        where they are."""
        axes = self.graph.axes[path]
        shape = self.graph.shapes[path].shape
        before, after = (
            layout.sharding(axes, shape) for layout in (self.graph.layout, self.layout)
        )
        return path not in self.graph.host_tables and not before.is_equivalent_to(after, len(shape))

    def _make(self, originals: dict[str, jax.Array], old) -> dict[str, jax.Array | qwix.QArray]:
        """Copies the weights. `old` is not read: it is donated, so that the result gets its
        buffers."""
        copies = {}
        for path, array in originals.items():
            array = fetch(array)
            if self._qtype is not None and path in self.graph.inputs:
                if isinstance(array, qwix.QArray):
                    raise ValueError(
                        f"generator.weights: {path} is stored quantised already; leave it out"
                    )
                array = quantize(array, self._qtype, self.graph.inputs[path])
            else:
                array = self.graph.cast_for_products({path: array})[path]
            if self.layout is not self.graph.layout:  # quantised before it is sent: fewer bytes
                array = self._constrain(path, array, self.graph.layout)
            copies[path] = self._constrain(path, array, self.layout)
        return copies

    def _constrain(self, path: str, array, layout: Layout):
        return jax.lax.with_sharding_constraint(array, self._shardings(path, array, layout))

    def _shardings(self, path: str, array, layout: Layout) -> Any:
        """Returns the shardings of a copy."""
        axes = self.graph.axes[path]
        if isinstance(array, qwix.QArray):
            return quantized_shardings(layout, axes, array)
        return layout.sharding(axes, array.shape)


def _shape_of(originals: dict[str, jax.Array], old: Any) -> tuple[int, int]:
    """Returns (number of weights, whether there are earlier copies)."""
    return len(originals), int(old is not None)


def _abstract(array, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
