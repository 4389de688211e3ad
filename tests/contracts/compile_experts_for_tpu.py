"""Compiles the gradient of a mixture of experts for four chips of a TPU, without one: run by test_experts_for_tpu.py.

    python compile_experts_for_tpu.py gather|all_to_all|hidden '{"fsdp": 2, "expert": 2}' v5p:2x2x1

Prints what the compiled program has as JSON: kind of collective, or name of a kernel -> the number of them. Needs
libtpu.
"""

import collections
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

dump = tempfile.TemporaryDirectory()
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
os.environ["XLA_FLAGS"] = (
    f"--xla_dump_to={dump.name}"  # compiled.as_text() fails for programs with asynchronous updates
)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from the cache is not dumped

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from policy.cache.step import Step  # noqa: E402
from policy.config import DecoderConfig, Moe, Norm, Router, Runtime  # noqa: E402
from policy.experts.experts import AXES  # noqa: E402
from policy.experts.moe import MixtureOfExperts  # noqa: E402
from policy.mesh.sharding import layout  # noqa: E402

B, T, E = 8, 256, 512


def main(scheme: str, degrees: dict, topology: str) -> None:
    mesh = layout(degrees, devices=topologies.get_topology_desc(topology, platform="tpu").devices).for_experts(scheme)
    runtime = replace(Runtime(dtype="bfloat16", expert_parallel=scheme), layout=mesh)
    with nnx.use_eager_sharding(False):
        config, spec = DecoderConfig(16, E, (), Norm(), "none", "{}"), Moe(Router(16, 4, score="sigmoid"), 256)
        graph, state = nnx.split(nnx.eval_shape(lambda: MixtureOfExperts(spec, config, nnx.Rngs(0))))

    def put(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(axes, shape))

    def weight(path, leaf):
        axes = AXES.get(path[0].key.removeprefix("expert_").removesuffix("_proj"), (None,) * len(leaf.shape))
        return put(leaf.shape, leaf.dtype, *axes)

    weights = jax.tree_util.tree_map_with_path(weight, state)
    x, segments = put((B, T, E), jnp.bfloat16, "batch", None, None), put((B, T), jnp.int32, "batch", None)

    def loss(weights, x, segments):
        out, _ = nnx.merge(graph, weights)(x, Step(segments, segments), runtime)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    places = jax.tree.map(lambda a: a.sharding, (weights, x))
    jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=places).lower(weights, x, segments).compile()
    text = max(Path(dump.name).glob("*.after_optimizations.txt"), key=lambda file: file.stat().st_size).read_text()
    kinds = re.findall(r" (ragged-all-to-all|all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", text)
    kernels = [
        re.sub(r"[.\d]+$", "", name) for name in re.findall(r'%(\S+) = .*custom_call_target="tpu_custom_call"', text)
    ]
    print(json.dumps(collections.Counter(kinds + kernels)))


main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
