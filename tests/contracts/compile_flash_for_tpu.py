"""Compiles the gradient and the first prefill of two layers of a model for chips of a TPU, without
one: run by test_flash_for_tpu.py.

    python compile_flash_for_tpu.py FAMILY TOPOLOGY MESH(JSON)

Prints as JSON, for "gradient" and "prefill", the calls of attention kernels in the program, the
shapes of scores, of the tokens of a row, or of a chunk of them, with all of them, and those of
logits of all tokens of a device. Needs libtpu.
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
from policy.cache import cache as caches
from policy.cache.step import Step
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Graph

# Sizes that nothing else has. The dense form takes queries in chunks.
ROWS, LENGTH, CHUNK, VOCAB = 4, 1536, 768, 40960
SIZES = {
    "Llama": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "GptOss": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 256,
    },
    "DeepseekV3": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 256,
    },
}


def main(family: str, topology: str, degrees: dict) -> dict:
    mesh = layout(
        degrees,
        devices=topologies.get_topology_desc(topology, platform="tpu").devices[
            : math.prod(degrees.values())
        ],
    )
    sizes = SIZES[family] | {"num_hidden_layers": 2, "vocab_size": VOCAB}
    config = families.read(configuration(family, **STANDARD[family] | sizes))
    graph = Graph(
        config,
        Runtime(
            dtype="bfloat16", param_dtype="bfloat16", scan=True, remat="full", attention_chunk=CHUNK
        ),
        mesh,
    )

    def put(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(axes, shape))

    params = {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=graph.shardings[path])
        for path, a in graph.shapes.items()
    }
    rows = put((ROWS, LENGTH), jnp.int32, "batch", None)

    def loss(params, tokens, segments):
        return jnp.sum(
            graph.logprobs(params, tokens, modes.make_step(tokens, segments=segments), 1.0)[0]
        )

    def prefill(params, tokens, lengths):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        step = Step(positions, (positions < lengths[:, None]).astype(jnp.int32), contiguous=True)
        cache = caches.create(config, ROWS, LENGTH, "bfloat16", scan=True)
        return modes.prefill(graph.decoder(params), tokens, step, cache, graph.runtime)

    lengths = put((ROWS,), jnp.int32, "batch")
    jax.jit(jax.grad(loss)).lower(params, rows, rows).compile()
    jax.jit(prefill).lower(params, rows, lengths).compile()
    tokens = ROWS * LENGTH // math.prod(degrees.values())
    return {
        "gradient": _shapes_and_kernels("loss", tokens),
        "prefill": _shapes_and_kernels("prefill", tokens),
    }


def _shapes_and_kernels(name: str, tokens: int) -> dict:
    text = program_text(f"jit_{name}")
    shapes = {tuple(map(int, match.split(","))) for match in re.findall(r"\w+\[([\d,]+)\]", text)}
    scores = [shape for shape in shapes if shape.count(LENGTH) > 1 or {LENGTH, CHUNK} <= set(shape)]
    logits = [
        shape
        for shape in shapes
        if {VOCAB, VOCAB // 2, VOCAB // 4} & set(shape) and math.prod(shape) >= tokens * VOCAB
    ]
    calls = re.findall(r'%(splash\w*)\S* = .*custom_call_target="tpu_custom_call"', text)
    return {"kernels": sorted(calls), "scores": sorted(scores), "logits": sorted(logits)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
