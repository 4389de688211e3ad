"""Merges an adapter into its base weights: W + scale B A, for DoRA with the lengths of
its outputs' weights set to the trained magnitude. The sum is computed in float32 and then cast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policy.adapter_spec import LORA_A, LORA_B, MAGNITUDE, AdapterSpec
from policy.huggingface.peft.targets import EMBEDDING, HEAD
from policy.model import Graph
from policy.ops.parameter import MatrixDims
from policy.ops.quantization import floats

# |change| / |W| below which bfloat16 loses a sixth of the change and more.
SMALL_CHANGE = 1e-2


class MergeError(ValueError):
    """Raised for an adapter that no set of weights of the model is equal to."""


@dataclass(frozen=True)
class Merged:
    """Weights with an adapter merged into them, and for each adapted weight |change| / |W|, the
    Frobenius norms over all layers."""

    params: dict[str, jax.Array]
    changes: dict[str, float]

    @property
    def lost_in_bfloat16(self) -> dict[str, float]:
        """The changes so small that bfloat16 loses a good part of them; none where the weights are
        stored in more bits."""
        return {
            path: change
            for path, change in self.changes.items()
            if 0 < change < SMALL_CHANGE and self.params[path].dtype == jnp.bfloat16
        }


class MergedWeight(NamedTuple):
    """A weight with its adapter, and change: |change| / |W|, a scalar."""

    weight: jax.Array
    change: jax.Array


def merged(graph: Graph, spec: AdapterSpec, params: Mapping[str, Any]) -> Merged:
    """Merges the adapter in `params`, which has the weights of `graph` and the arrays of the
    adapter by path. Quantised weights are dequantised first. Raises MergeError for an adapter of
    the embedding of a tied head."""
    adapted = {path for path in graph.paths if f"{path}{LORA_A}" in params}
    if graph.config.tied_head and {EMBEDDING, HEAD} & adapted:
        raise MergeError(
            "embedding and head of this model are one table: an adapter of one of its uses cannot "
            "be merged into it"
        )
    return merged_trunk(graph, spec, params)


def merged_trunk(graph: Graph, spec: AdapterSpec, params: Mapping[str, Any]) -> Merged:
    """Merges as `merged` does the adapter of a decoder whose head nothing reads, as of a reward
    model."""
    adapted = [path for path in graph.paths if f"{path}{LORA_A}" in params]
    result = {path: params[path] for path in graph.paths}
    changes = {}
    for path in adapted:
        weight = merged_weight(graph, spec, path, params[path], params)
        result[path] = weight.weight
        changes[path] = float(weight.change)
    return Merged(result, changes)


def merged_weight(
    graph: Graph, spec: AdapterSpec, path: str, weight: Any, adapter: Mapping[str, Any]
) -> MergedWeight:
    """Returns the weight at `path` with its adapter, whose arrays are in `adapter` by path, in the
    type of the weights of `graph`."""
    total, change = _merge(
        floats(weight),
        adapter[f"{path}{LORA_A}"],
        adapter[f"{path}{LORA_B}"],
        adapter.get(f"{path}{MAGNITUDE}") if spec.dora else None,
        graph.product_dims(path),
        spec.scale,
    )
    return MergedWeight(total.astype(graph.shapes[path].dtype), change)


def _merge(weight, a, b, magnitude, dims: MatrixDims, scale: float) -> MergedWeight:
    """Returns the merged weight in float32."""
    weight = jnp.asarray(weight, jnp.float32)
    with jax.default_matmul_precision("highest"):
        change = scale * product(
            jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), dims, jnp.einsum
        )
    total = weight + change
    if magnitude is not None:
        norms = jnp.sqrt(jnp.square(total).sum(dims.rows, keepdims=True))
        total *= jnp.expand_dims(jnp.asarray(magnitude, jnp.float32), dims.rows) / norms
        change = total - weight
    size = jnp.sqrt(jnp.square(weight).sum())
    ratio = jnp.sqrt(jnp.square(change).sum()) / jnp.where(size == 0, math.inf, size)
    return MergedWeight(total, ratio)


def product(a, b, dims: MatrixDims, einsum: Callable):
    """Returns B A in the shape of the weight with dimensions `dims`: a [counts?, in..., r] times b
    [counts?, r, out...]. A factor without the dimensions that count matrices is that of each."""
    rows, columns = dims
    counts = max(a.ndim - 1 - len(rows), b.ndim - 1 - len(columns))
    letters = ascii_lowercase[: counts + len(rows) + len(columns)]
    rank = "z"
    inputs = "".join(letters[dim] for dim in rows)
    outputs = "".join(letters[dim] for dim in columns)
    lead = "".join(letter for letter in letters if letter not in inputs + outputs)
    # Of several leading dimensions, a shared factor lacks the last: that of the experts.
    a_lead = lead[: a.ndim - 1 - len(rows)]
    b_lead = lead[: b.ndim - 1 - len(columns)]
    return einsum(f"{a_lead}{inputs}{rank},{b_lead}{rank}{outputs}->{letters}", a, b)
