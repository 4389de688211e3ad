"""Brings a model to the memory of the host, where devices have no room for a second one."""

from __future__ import annotations

import jax

from policy.mesh import processes
from policy.mesh.sharding import layout
from policy.model import Graph, Model
from policy.runtime import Runtime


def host_copy(model: Model) -> Model:
    """Returns a model with the same weights, none of them quantised, for one CPU device of this
    process. It computes in float32. Raises RuntimeError if jax has no CPU."""
    mesh = layout({"fsdp": 1}, devices=jax.devices("cpu")[:1])
    param_dtype = model.graph.runtime.param_dtype
    graph = Graph(model.config, Runtime(dtype="float32", param_dtype=param_dtype), mesh)
    weights = {
        path: jax.device_put(processes.on_host(model.params[path]), graph.sharding(path))
        for path in graph.paths
    }
    return Model(graph, weights)
