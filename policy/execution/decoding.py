"""Weights in the form that decoding on CPU reads fastest (policy/ops/projection.py).

A program of many steps makes them at its start, and they live inside that program; the policy's own arrays do not
change. On TPU and GPU the weights stay as they are: stacks are scanned, and a product reads its weight in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from policy.model import Graph
from policy.ops.projection import Projection, make_projections

# Weights of one module that read the same input. Decoding fuses them into one product.
FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj"))
# A weight that is read in parts, not by a product of its own (policy/attention/mla.py).
NOT_PRODUCTS = ("kv_b_proj",)


class Repeats:
    """A stacked weight as one array per repeat; `a[r]` is repeat r, as for the stacked array.

    XLA slices a stacked array in every step of a loop, which copies all weights at each step.
    """

    def __init__(self, each: Iterable):
        self._each = tuple(each)

    def __getitem__(self, r: int):
        return self._each[r]


def prepare_for_decoding(graph: Graph, params: dict[str, jax.Array], rows: int) -> dict[str, Any]:
    """Prepares `params` for steps of `rows` tokens, on CPU with unrolled layers. Call it outside the loop of the steps.

    Float32 weights on one device are fused and transposed; others are only split into repeats.
    """
    can_fuse = graph.runtime.dtype == "float32" and graph.runtime.quantization is None and graph.layout.mesh.size == 1
    prepared: dict[str, Any] = dict(params)
    for path in params:
        if path.startswith("stacks.") and isinstance(prepared[path], (jax.Array, qwix.QArray)):
            fused = _fused_with(graph, params, path) if can_fuse else []
            prepared |= _fuse(graph, params, fused, rows) if fused else {path: _split_repeats(params[path])}
    head = "embed_tokens" if graph.config.tied_head else "lm_head"
    if can_fuse and head not in graph.hosted:
        prepared[head] = _head(params[head])
    return prepared


def _split_repeats(weight) -> Repeats:
    def repeat(r: int):
        return jax.lax.optimization_barrier(jax.tree.map(lambda a: a[r], weight))

    return Repeats(map(repeat, range(jax.tree.leaves(weight)[0].shape[0])))


def _fused_with(graph: Graph, params: dict[str, jax.Array], path: str) -> list[str]:
    """Returns the paths of the weights that are fused with this one, itself included; none if it cannot be fused."""
    if not _can_fuse(graph, params, path):
        return []
    module, _, name = path.rpartition(".")
    names = next((names for names in FUSED_PROJECTIONS if name in names), (name,))
    return [p for p in (f"{module}.{name}" for name in names) if _can_fuse(graph, params, p)]


def _can_fuse(graph: Graph, params: dict[str, jax.Array], path: str) -> bool:
    """Whether this is a weight of floats whose products sum over the first dimensions of each repeat."""
    if path not in graph.inputs or path in graph.hosted or isinstance(params[path], qwix.QArray):
        return False
    inputs = graph.inputs[path]
    return inputs == tuple(range(1, len(inputs) + 1)) and path.rpartition(".")[2] not in NOT_PRODUCTS


def _fuse(graph: Graph, params: dict[str, jax.Array], paths: list[str], rows: int) -> dict[str, Repeats]:
    inputs = len(graph.inputs[paths[0]])
    R = params[paths[0]].shape[0]
    repeats = [make_projections([params[path][r] for path in paths], inputs, rows) for r in range(R)]
    return {path: Repeats(projections[i] for projections in repeats) for i, path in enumerate(paths)}


def _head(weight_VE: jax.Array) -> Projection:
    """Wraps the head, a table [V, E], which is stored transposed already."""
    V, E = weight_VE.shape
    return Projection(weight_VE.astype(jnp.float32), transposed=True, start=0, inputs=(E,), outputs=(V,))
