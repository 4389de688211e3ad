"""Adapters for tests: tiny decoders with random adapters, and merges by numpy.

L layers, G experts, E inputs, F outputs, r rank.
"""

from __future__ import annotations

import jax
import numpy as np

from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
from policy.huggingface.peft.targets import resolved
from policy.model import Graph, Model

RANK = 4


def with_adapter(model: Model, spec: AdapterSpec | None = None, seed: int = 0, size: float = 0.3):
    """The model with random numbers in all arrays of an adapter."""
    spec = spec or AdapterSpec(rank=RANK, alpha=6.0)
    graph = model.graph.with_runtime(adapter=resolved(model.graph, spec))
    adapters = Adapters(graph)
    rng = np.random.default_rng(seed)
    arrays = adapters.init(model.params, seed)
    changed = {
        path: jax.device_put(
            (np.asarray(array) + size * rng.normal(size=array.shape)).astype(np.float32),
            adapters.shardings[path],
        )
        for path, array in arrays.items()
    }
    return Model(graph, {**model.params, **changed})


def merged(model: Model) -> Model:
    """The model with its adapter merged into its weights by numpy, in float64."""
    graph: Graph = model.graph
    spec = graph.runtime.adapter
    params = {path: model.params[path] for path in graph.paths}
    for path in (target.path for target in spec.adapted):
        rows, columns = graph.product_dims(path)
        weight = np.asarray(params[path], np.float64)
        front = tuple(dim for dim in range(weight.ndim) if dim not in rows + columns)
        order = front + rows + columns
        moved = weight.transpose(order)
        sizes = moved.shape
        G = sizes[: len(front)]
        E = int(np.prod(sizes[len(front) : len(front) + len(rows)]))
        flat = moved.reshape(*G, E, -1)
        a, b = (np.asarray(model.params[f"{path}.lora_{x}"], np.float64) for x in "ab")
        r = a.shape[-1]
        a = a.reshape(*a.shape[: a.ndim - len(rows) - 1], E, r)
        b = b.reshape(*b.shape[: b.ndim - len(columns)], -1)
        missing = len(front) + 2 - a.ndim
        a = np.expand_dims(a, tuple(range(a.ndim - 2, a.ndim - 2 + missing)))
        missing = len(front) + 2 - b.ndim
        b = np.expand_dims(b, tuple(range(b.ndim - 2, b.ndim - 2 + missing)))
        new = flat + spec.scale * a @ b
        if f"{path}.magnitude" in model.params:
            m = np.asarray(model.params[f"{path}.magnitude"], np.float64).reshape(*G, 1, -1)
            new = new * m / np.linalg.norm(new, axis=-2, keepdims=True)
        new = new.reshape(sizes).transpose(np.argsort(order)).astype(np.float32)
        params[path] = jax.device_put(new, graph.sharding(path))
    return Model(graph.with_runtime(adapter=None), params)


def factor_gradients(model: Model, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of A and B from those of the merged weights, where these have some: s dW B^T and
    s A^T dW in float64, with A [G..., E, r], B [G..., r, F] and W [G..., E, F]."""
    spec = model.graph.runtime.adapter
    result = {}
    for target in spec.adapted:
        path = target.path
        if path not in gradients:
            continue
        rows, columns = model.graph.matrices[path]
        changed = gradients[path]
        front = tuple(dim for dim in range(changed.ndim) if dim not in rows + columns)
        a, b = (np.asarray(model.params[f"{path}.lora_{x}"], np.float64) for x in "ab")
        G = a.shape[: len(front)]
        r = a.shape[-1]
        flat_a = a.reshape(*G, -1, r)
        flat_b = b.reshape(*G, r, -1)
        flat = changed.transpose(front + rows + columns).reshape(*G, flat_a.shape[-2], -1)
        of_a = spec.scale * flat @ flat_b.swapaxes(-1, -2)
        of_b = spec.scale * flat_a.swapaxes(-1, -2) @ flat
        result[f"{path}.lora_a"] = of_a.reshape(a.shape)
        result[f"{path}.lora_b"] = of_b.reshape(b.shape)
    return result
