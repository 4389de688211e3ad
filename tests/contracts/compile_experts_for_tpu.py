"""Compiles the gradient of a mixture of experts for four chips of a TPU, without one: run by
test_experts_for_tpu.py.

    python compile_experts_for_tpu.py gather|all_to_all|hidden '{"fsdp": 2, "expert": 2}' v5p:2x2x1

Prints what the compiled program has as JSON: kind of collective, or name of a kernel -> the number
of them. Needs libtpu.
"""

import collections
import json
import re
import sys
from dataclasses import replace

from tpu_compiler import program_text  # isort: split

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from policy.cache.step import Step
from policy.config import DecoderConfig, Moe, Norm, Router, Runtime
from policy.experts.experts import AXES
from policy.experts.moe import MixtureOfExperts
from policy.mesh.sharding import layout

B, T, E = 8, 256, 512


def main(scheme: str, degrees: dict, topology: str) -> None:
    mesh = layout(
        degrees, devices=topologies.get_topology_desc(topology, platform="tpu").devices
    ).for_experts(scheme)
    runtime = replace(Runtime(dtype="bfloat16", expert_parallel=scheme), layout=mesh)
    with nnx.use_eager_sharding(False):
        config, spec = (
            DecoderConfig(16, E, (), Norm(), "none", "{}"),
            Moe(Router(16, 4, score="sigmoid"), 256),
        )
        graph, state = nnx.split(
            nnx.eval_shape(lambda: MixtureOfExperts(spec, config, nnx.Rngs(0)))
        )

    def put(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(axes, shape))

    def weight(path, leaf):
        axes = AXES.get(
            path[0].key.removeprefix("expert_").removesuffix("_proj"), (None,) * len(leaf.shape)
        )
        return put(leaf.shape, leaf.dtype, *axes)

    weights = jax.tree_util.tree_map_with_path(weight, state)
    x, segments = (
        put((B, T, E), jnp.bfloat16, "batch", None, None),
        put((B, T), jnp.int32, "batch", None),
    )

    def loss(weights, x, segments):
        out, _ = nnx.merge(graph, weights)(x, Step(segments, segments), runtime)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    places = jax.tree.map(lambda a: a.sharding, (weights, x))
    jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=places).lower(
        weights, x, segments
    ).compile()
    text = program_text()
    kinds = re.findall(
        r" (ragged-all-to-all|all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", text
    )
    kernels = [
        re.sub(r"[.\d]+$", "", name)
        for name in re.findall(r'%(\S+) = .*custom_call_target="tpu_custom_call"', text)
    ]
    print(json.dumps(collections.Counter(kinds + kernels)))


main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
