"""The adapter of a policy as weights that learn, over a decoder that does not.

`Adapters` says which arrays there are and where they lie. An update reads them together with the
weights of the decoder, as one dict from path to array (`Graph.decoder`): the adapter of the weight
at `P` has the paths `P.lora_a` [L, G, E..., r], `P.lora_b` [L, G, r, F...] and, with DoRA,
`P.magnitude` [L, G, F...]. Weights of `AdapterSpec.train` have their own paths.

L layers of a stack, G experts, E inputs, F outputs, r rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from policy.adapter_spec import LORA_A, LORA_B, MAGNITUDE, AdaptedWeight, AdapterSpec
from policy.config import Runtime
from policy.model import EMBEDDING, Graph
from policy.ops.host_memory import fetch
from policy.ops.parameter import MatrixDims
from policy.ops.quantization import dequantised, floats
from policy.ops.seeds import checked_seed

_ENDS = (LORA_A, LORA_B, MAGNITUDE)


def weight_of(path: str) -> str:
    """Returns the path of the weight that the array at `path` adapts; of any other array its own
    path."""
    end = next((end for end in _ENDS if path.endswith(end)), "")
    return path.removesuffix(end)


def is_adapter(path: str) -> bool:
    """Tells whether `path` is that of an array of an adapter."""
    return path.endswith(_ENDS)


def has_adapter(params: Mapping[str, Any]) -> bool:
    """Tells whether weights, by path, have an adapter."""
    return any(map(is_adapter, params))


class Adapters:
    """The arrays that learn where a decoder has an adapter: what an optimizer asks of a model
    (rl/training/weights.py:LearningModel). It holds no array."""

    def __init__(self, graph: Graph):
        """graph: of the policy; its runtime has an AdapterSpec that knows its weights."""
        spec = graph.runtime.adapter
        assert spec is not None and (spec.adapted or spec.train), "the runtime has no adapter"
        self.spec: AdapterSpec = spec
        self.trunk = graph
        self.runtime: Runtime = replace(graph.runtime, param_dtype=spec.dtype)
        self.untrained: frozenset[str] = frozenset()
        self.hosted: frozenset[str] = frozenset()
        self.host_tables: frozenset[str] = frozenset()
        self.axes: dict[str, tuple[str | None, ...]] = {}
        self.matrices: dict[str, MatrixDims] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}
        self._targets = {target.path: target for target in spec.adapted}
        for target in spec.adapted:
            self._declare(target)
        for path in spec.train:
            self.axes[path] = graph.axes[path]
            self.sizes[path] = graph.sizes[path]
            if path in graph.matrices:
                self.matrices[path] = graph.matrices[path]

    def _declare(self, target: AdaptedWeight) -> None:
        """Declares the arrays of the adapter of a weight."""
        path = target.path
        rank = target.rank
        axes = self.trunk.axes[path]
        size = self.trunk.sizes[path]
        rows, columns = self.trunk.product_dims(path)
        front = tuple(dim for dim in range(len(size)) if dim not in rows + columns)
        of_a = front
        of_b = front
        if self.spec.experts == "shared" and "exp" in axes:
            shared = tuple(dim for dim in front if axes[dim] != "exp")
            if any(axes[dim] == "embed_moe" for dim in rows):
                of_a = shared
            else:
                of_b = shared

        def declare(end: str, dims: tuple[int | None, ...], at: MatrixDims | None) -> None:
            self.axes[path + end] = tuple(None if dim is None else axes[dim] for dim in dims)
            self.sizes[path + end] = tuple(rank if dim is None else size[dim] for dim in dims)
            if at is not None:
                self.matrices[path + end] = at

        E = len(rows)
        F = len(columns)
        after_a = tuple(range(len(of_a), len(of_a) + E))
        declare(LORA_A, (*of_a, *rows, None), MatrixDims(after_a, (len(of_a) + E,)))
        after_b = tuple(range(len(of_b) + 1, len(of_b) + 1 + F))
        declare(LORA_B, (*of_b, None, *columns), MatrixDims((len(of_b),), after_b))
        if self.spec.dora:
            declare(MAGNITUDE, (*front, *columns), None)

    @cached_property
    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        """Returns the sharding of each array."""
        layout = self.trunk.layout
        return {path: layout.sharding(self.axes[path], size) for path, size in self.sizes.items()}

    @cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of each array."""
        dtype = jnp.dtype(self.spec.dtype)
        return {path: jax.ShapeDtypeStruct(size, dtype) for path, size in self.sizes.items()}

    @property
    def parameters(self) -> int:
        """The number of weights that learn."""
        return sum(math.prod(size) for size in self.sizes.values())

    def init(self, base: Mapping[str, jax.Array], seed: int) -> dict[str, jax.Array]:
        """Returns the arrays at the start, with which the decoder computes what it computes without
        them: A uniform in +-1/sqrt(inputs of a product), as PEFT draws it, B = 0, the magnitude the
        norms of the weights, and copies of the weights that learn in full. Of an embedding A is 0,
        and B is normally distributed, as in PEFT.

        base: the weights of the decoder. seed: of the run. The numbers do not depend on the mesh.
        """
        read = {weight_of(path) for path in self.sizes if not path.endswith((LORA_A, LORA_B))}

        def create(key: jax.Array, base: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {path: self._initial(path, key, base) for path in self.sizes}

        with self.trunk.precision():
            return jax.jit(create, out_shardings=self.shardings)(
                jax.random.key(checked_seed(seed)), {path: base[path] for path in read}
            )

    def _initial(self, path: str, key: jax.Array, base: Mapping[str, jax.Array]) -> jax.Array:
        shape = self.shapes[path]
        of_embedding = weight_of(path) == EMBEDDING
        if path.endswith(LORA_A if of_embedding else LORA_B):
            return jnp.zeros(shape.shape, shape.dtype)
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        if path.endswith(LORA_B):
            return jax.random.normal(own, shape.shape, shape.dtype)
        if path.endswith(LORA_A):
            inputs = math.prod(shape.shape[dim] for dim in self.matrices[path].rows)
            bound = 1.0 / math.sqrt(inputs)
            drawn = jax.random.uniform(own, shape.shape, shape.dtype, -bound, bound)
            return self._where_adapted(path, drawn)
        weight = fetch(base[weight_of(path)])
        if path.endswith(MAGNITUDE):
            return self._norms(weight_of(path), weight).astype(shape.dtype)
        return floats(weight).astype(shape.dtype)

    def _norms(self, path: str, weight: Any) -> jax.Array:
        """Returns the norms of a weight over the inputs of each output, float32. Of a stack that is
        stored quantised one layer at a time is dequantised."""
        if not isinstance(weight, qwix.QArray):
            rows = self.trunk.product_dims(path).rows
            return jnp.linalg.norm(weight.astype(jnp.float32), axis=rows)
        rows = self.trunk.layer_dims(path).rows

        def norms(weight: qwix.QArray) -> jax.Array:
            return jnp.linalg.norm(dequantised(weight), axis=rows)

        stacked = self.axes[path + MAGNITUDE][:1] == ("layers",)
        return jax.lax.map(norms, weight) if stacked else norms(weight)

    def _where_adapted(self, path: str, array: jax.Array) -> jax.Array:
        """Returns an array of an adapter, 0 in repeats of the stack that have none."""
        repeats = self._targets[weight_of(path)].repeats
        if repeats is None:
            return array
        mask = jnp.zeros(array.shape[0], bool).at[jnp.asarray(repeats)].set(True)
        return jnp.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array, 0.0)
