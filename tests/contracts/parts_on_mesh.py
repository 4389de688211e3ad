"""Residual streams and n-gram tables, Engram's and per-layer embeddings, on a mesh of four CPU
devices, compared with one: run by test_parts_on_a_mesh.py.

Prints a JSON object: for each decoder and mesh the largest difference of log-probabilities and of
gradients (over the largest gradient), whether the table is cut, and the kinds of memory that it
lives in.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from oracles import configuration, random_model, short, tokens

from policy import families
from policy.config import Runtime
from policy.execution import row_tables
from policy.mesh.sharding import layout
from policy.modes import make_step
from policy.ops.host_memory import on_host

MESHES = {
    "fsdp4": ({"fsdp": 4}, "device"),
    "fsdp2_tensor2": ({"fsdp": 2, "tensor": 2}, "device"),
    "fsdp4_host": ({"fsdp": 4}, "host"),
}
SECTION = {"layers": [1], "vocab_bases": [50, 70], "heads": 2, "head_dim": 8, "kernel_size": 3}
PARTS = {"engram": SECTION, "hyper_connections": {"streams": 4, "norm_weight": True}}
DECODERS = {
    "engram": configuration("Llama", num_hidden_layers=2, duet=PARTS),
    "per_layer": short("Qwen4Exp", ple_embed_dim=32),
}


def computed(hf, mesh, memory):
    config = families.read(hf)
    model = random_model(config, runtime=Runtime(table_memory=memory, remat="none"), mesh=mesh)
    rows = jnp.asarray(tokens(4, 12))
    segments = jnp.asarray(
        np.array([[1] * 12, [1] * 5 + [2] * 7, [0] * 3 + [1] * 9, [1] * 9 + [0] * 3])
    )
    graph = model.graph
    weights = {
        path: array
        for path, array in model.params.items()
        if path not in graph.untrained | graph.host_tables
    }

    step = replace(make_step(rows, None, segments), tokens=rows)

    def loss(weights):
        logp = graph.logprobs(model.params | weights, rows, make_step(rows, None, segments), 1.0)[0]
        return logp.sum(), logp

    def gradient(params):
        at, result = row_tables.read_rows(graph, params, step, graph.host_tables)
        grads, logp = jax.grad(loss, has_aux=True)(weights | result)
        slopes = row_tables.gradients(graph, at, {path: grads.pop(path) for path in result})
        return grads | on_host(
            lambda one: row_tables.summed(jax.tree.map(lambda a: a[None], one)), slopes
        ), logp

    places = {path: graph.sharding(path) for path in graph.paths if path not in graph.untrained}
    grads, logp = jax.block_until_ready(
        jax.jit(gradient, out_shardings=(places, None))(model.params)
    )
    return model, {path: np.asarray(grad) for path, grad in grads.items()}, np.asarray(logp)


def compare(hf) -> dict:
    _, expected, logp = computed(hf, None, "device")
    largest, result = max(np.abs(grad).max() for grad in expected.values()), {}
    for name, (degrees, memory) in MESHES.items():
        model, grads, other = computed(hf, layout(degrees), memory)
        [table] = (array for path, array in model.params.items() if path.endswith(".lookup.table"))
        result[name] = {
            "logp": float(np.abs(other - logp).max()),
            "gradient": max(
                float(np.abs(grads[path] - grad).max() / largest) for path, grad in expected.items()
            ),
            "cut": len({str(shard.index) for shard in table.addressable_shards}),
            "memory": table.sharding.memory_kind,
        }
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps({name: compare(hf) for name, hf in DECODERS.items()}))
