"""The weights of a decoder as decoding on CPU reads them fastest (policy/ops/projection.py), made at the start of a program that
takes many steps. The policy's own arrays stay as they are: what is made here lives inside that program.

On TPU and GPU nothing is changed: there the stacks are scanned, and a product reads its weight where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import qwix

from policy.model import Graph
from policy.ops.projection import Projection, make_projections

# Weights of one module that read the same input: one product in place of two or three.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj"))
# Read in parts, not by a product of its own (policy/attention/mla.py).
NOT_PRODUCTS = ("kv_b_proj",)


class Repeats:
    """A stacked weight cut into those of its repeats; `a[r]` is repeat r, as of the stacked array. XLA cuts a slice out of a
    stacked array in every step of a loop, which is a copy of all weights a step."""

    def __init__(self, each: Iterable):
        self._each = tuple(each)

    def __getitem__(self, r: int):
        return self._each[r]


def laid_out(graph: Graph, params: dict[str, jax.Array], rows: int) -> dict:
    """`params` for steps of `rows` tokens each, on CPU with unrolled layers; to be called outside their loop. Float32 weights on
    one device are joined and transposed, others only cut."""
    plain = graph.runtime.dtype == "float32" and graph.runtime.quantization is None and graph.layout.mesh.size == 1
    found = dict(params)
    for path in params:
        if path.startswith("stacks.") and isinstance(found[path], (jax.Array, qwix.QArray)):
            joined = _group(graph, params, path) if plain else []
            found |= _joined(graph, params, joined, rows) if joined else {path: _cut(params[path])}
    head = "embed_tokens" if graph.config.tied_head else "lm_head"
    if plain and head not in graph.hosted:
        found[head] = _head(params[head])
    return found


def _cut(weight) -> Repeats:
    def repeat(r: int):
        return jax.lax.optimization_barrier(jax.tree.map(lambda a: a[r], weight))

    return Repeats(map(repeat, range(jax.tree.leaves(weight)[0].shape[0])))


def _group(graph: Graph, params: dict[str, jax.Array], path: str) -> list[str]:
    """The weights that are joined with this one, itself among them; none if its products are not plain ones."""
    module, _, name = path.rpartition(".")
    names = next((names for names in TOGETHER if name in names), (name,))
    return (
        [p for p in (f"{module}.{name}" for name in names) if _plain(graph, params, p)]
        if _plain(graph, params, path)
        else []
    )


def _plain(graph: Graph, params: dict[str, jax.Array], path: str) -> bool:
    """Whether this is a weight of floats whose products sum over its first dimensions, those of a repeat counted."""
    if path not in graph.inputs or path in graph.hosted or isinstance(params[path], qwix.QArray):
        return False
    inputs = graph.inputs[path]
    return inputs == tuple(range(1, len(inputs) + 1)) and path.rpartition(".")[2] not in NOT_PRODUCTS


def _joined(graph: Graph, params: dict[str, jax.Array], paths: list[str], rows: int) -> dict[str, Repeats]:
    inputs = len(graph.inputs[paths[0]])
    R = params[paths[0]].shape[0]
    each = [make_projections([params[path][r] for path in paths], inputs, rows) for r in range(R)]
    return {path: Repeats(made[i] for made in each) for i, path in enumerate(paths)}


def _head(weight_VE: jax.Array) -> Projection:
    """The head, a table [V, E], which is transposed as it is."""
    V, E = weight_VE.shape
    return Projection(weight_VE.astype(jnp.float32), transposed=True, start=0, inputs=(E,), outputs=(V,))
