"""Compiles the gradient of two layers over rows of trees for chips of a TPU, without one: run by
test_flash_for_tpu.py.

    python compile_trees_for_tpu.py TOPOLOGY MESH(JSON) TOKENS

Prints as JSON the calls of attention kernels in the program and the MiB of its temporaries on a
device. Needs libtpu.
"""

import json
import math
import re
import sys

from tpu_compiler import program_text  # isort: split

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from oracles import STANDARD, configuration

from policy import families, modes
from policy.cache.paths import Tree
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Graph

ROWS = 4
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
}


def main(topology: str, degrees: dict, tokens: int) -> dict:
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[
        : math.prod(degrees.values())
    ]
    mesh = layout(degrees, devices=devices)
    config = families.read(configuration("Llama", **STANDARD["Llama"] | SIZES))
    graph = Graph(
        config, Runtime(dtype="bfloat16", param_dtype="bfloat16", scan=True, remat="full"), mesh
    )
    params = {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=graph.shardings[path])
        for path, a in graph.shapes.items()
    }
    shape = (ROWS, tokens)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh.sharding(("batch", None), shape))

    def loss(params, tokens, tree):
        return jnp.sum(graph.logprobs(params, tokens, modes.make_step(tokens, tree=tree), 1.0)[0])

    compiled = jax.jit(jax.grad(loss)).lower(params, rows, Tree(*[rows] * 5)).compile()
    text = program_text("jit_loss")
    calls = re.findall(r'%(splash\w*)\S* = .*custom_call_target="tpu_custom_call"', text)
    return {
        "kernels": sorted(calls),
        "temporaries": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
