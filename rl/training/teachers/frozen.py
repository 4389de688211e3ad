"""A model whose weights no update changes: where they come from, and in which type they are kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import qwix

from policy.config import StoredType
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import model_directory
from policy.huggingface.tensorfiles import ModelFileError
from policy.mesh.sharding import block_on_cpu_mesh
from policy.model import Graph
from policy.ops.host_memory import fetch, in_host_memory
from policy.ops.quantization import TYPES, quantize
from rl.errors import ModelError


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A model on the mesh of the run, which is read once.

    directory: of the weights; None: they are drawn from `seed`. stored_type: in which weights of
    products are kept; None: the type of the graph.
    """

    graph: Graph
    directory: Path | None = None
    seed: int = 0
    stored_type: StoredType | None = None

    @functools.cached_property
    def abstract(self) -> Mapping[str, Any]:
        """Returns the shapes and shardings of the weights."""
        return {path: self._abstract(path) for path in self.graph.paths}

    def _abstract(self, path: str) -> Any:
        shape = self.graph.shapes[path]
        sharding = self.graph.sharding(path)
        axes = self.graph.axes[path]
        array = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        if self.stored_type is None or path not in self.graph.inputs:
            return array
        inputs = self.graph.inputs[path]
        qtype = TYPES[self.stored_type]
        made = jax.eval_shape(lambda a: quantize(a, qtype, inputs), shape)
        # A scale has length 1, and so no axis, in the dimensions that products sum over. It is
        # small: it stays on the device where the values live in host memory.
        scale_axes = tuple(None if dim in inputs else axis for dim, axis in enumerate(axes))
        values = self.graph.layout.sharding(axes, made.qvalue.shape)
        values = in_host_memory(values) if path in self.graph.hosted else values
        scale = self.graph.layout.sharding(scale_axes, made.scale.shape)
        return replace(
            made,
            qvalue=jax.ShapeDtypeStruct(made.qvalue.shape, made.qvalue.dtype, sharding=values),
            scale=jax.ShapeDtypeStruct(made.scale.shape, made.scale.dtype, sharding=scale),
        )

    def read(self) -> dict[str, Any]:
        """Returns the weights on the mesh. Raises ModelError if they cannot be read."""
        if self.directory is None:
            drawn = self.graph.init(self.seed)
            params = {path: self._stored(path, drawn.pop(path)) for path in self.graph.paths}
        else:
            try:
                params, _ = model_directory.read_weights(
                    self.directory, self.graph, convert=self._stored
                )
            except (ModelFileError, UnsupportedModel) as error:
                raise ModelError(f"teacher {self.directory}: {error}") from None
        return block_on_cpu_mesh(params, self.graph.layout)

    def _stored(self, path: str, array: jax.Array) -> Any:
        """Returns a weight in the form in which it is kept, so that only one is there as floats
        too."""
        abstract = self.abstract[path]
        if not isinstance(abstract, qwix.QArray):
            return array
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        qtype = TYPES[cast(StoredType, self.stored_type)]
        inputs = self.graph.inputs[path]
        return jax.jit(lambda a: quantize(fetch(a), qtype, inputs), out_shardings=shardings)(array)
