"""Compiles decoding over a paged cache for a TPU slice and prints, as JSON, what a step moves in
the memory of a chip.

    python compile_decode_for_tpu.py PRESET TOPOLOGY DEGREES ROWS PAGES_OF_A_ROW RULES

The program makes STEPS greedy tokens for every row, in a loop, as a generator does. Bytes are those
of a step on one chip: a kernel reads every page of every row that the chip has once, with what
fills up its entries. Compared with `ideal`: every weight but the embedding, of which only the rows
of the tokens are read, and every entry of the cache once, as numbers.
"""

from __future__ import annotations

import json
import math
import sys

from tpu_compiler import program_text  # isort: split

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from policy import modes
from policy.cache import cache as caches
from policy.cache import pages
from policy.cache.pages import Pages
from policy.config import Runtime
from policy.huggingface import sources
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.plan.hlo import HloProgram
from rl.plan.hlo_text import dims

STEPS, SIZE = 4, 32
KERNELS = {"k": "paged_attention", "latent": "latent_paged_attention"}


def decoding(graph):
    """(params, cache, tokens [B], lengths [B], active [B], table [B, M]) -> (cache, tokens [STEPS,
    B])."""

    def run(params, cache, tokens, lengths, active, table):
        def one(i, carry):
            cache, token, made = carry
            with graph.precision():
                decoder = graph.decoder(params)
                step = modes.next_token_step(lengths + i, active, table)
                states, cache = modes.next_token_states(decoder, token, step, cache, graph.runtime)
                logits = modes.logits(decoder, states, graph.runtime)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return cache, token, made.at[i].set(token)

        cache, _, made = jax.lax.fori_loop(
            0, STEPS, one, (cache, tokens, jnp.zeros((STEPS, *tokens.shape), jnp.int32))
        )
        return caches.constrained(cache, graph.layout), made

    return run


def local(array) -> int:
    """Numbers of an array that one chip has."""
    return math.prod(array.sharding.shard_shape(array.shape))


def report(preset: str, topology: str, degrees: dict, rows: int, width: int, rules: dict) -> dict:
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[
        : math.prod(degrees.values())
    ]
    mesh = layout(degrees, rules, devices=devices)
    graph = Graph(sources.preset(preset), Runtime(dtype="bfloat16", param_dtype="bfloat16"), mesh)

    def put(array, axes):
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=mesh.sharding(axes, array.shape)
        )

    def ids(*shape):
        return put(jax.ShapeDtypeStruct(shape, jnp.int32), ("batch", None)[: len(shape)])

    parts = math.prod(degrees.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    number = parts * (rows // parts * width + 1)
    cache = jax.eval_shape(
        lambda: caches.create(graph.config, rows, Pages(number, SIZE), "bfloat16", scan=True)
    )
    cache = jax.tree.map(lambda array: put(array, pages.AXES), cache)
    params = {path: put(shape, graph.axes[path]) for path, shape in graph.shapes.items()}
    arguments = (params, cache, ids(rows), ids(rows), ids(rows), ids(rows, width))
    compiled = jax.jit(decoding(graph), donate_argnums=1).lower(*arguments).compile()
    text = program_text()

    pools = [part for stack in cache for layers in stack for part in layers]
    layer = {
        name: 2 * local(pool.array) // pool.array.shape[1] * (number - parts) // number
        for name, pool in pools[0].items()
    }
    kernel, formula = next(KERNELS[name] for name in layer if name in KERNELS), sum(layer.values())
    program = HloProgram(text, {kernel: formula})
    moved = program.moved()
    shapes = {tuple(p.sharding.shard_shape(p.shape)) for p in params.values()}
    full = sum(
        size * pools[0][name].dim // pools[0][name].array.shape[-1] for name, size in layer.items()
    )
    strangers = [
        (m.name, array, size)
        for m in moved
        for array, size in m.arrays
        if size >= full and array != kernel and dims(array) not in shapes
    ]
    cached = full * sum(pool.array.shape[1] for part in pools for pool in list(part.values())[:1])
    weights = sum(2 * local(p) for path, p in params.items() if path != "embed_tokens")
    return {
        "bytes": sum(m.bytes for m in moved) / STEPS,
        "ideal": weights + cached,
        "kernel_calls": sum(m.times for m in moved if m.arrays and m.arrays[0][0] == kernel)
        / STEPS,
        "layer": full,
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "strangers": strangers,
        "most": [(m.name, m.times, m.bytes) for m in sorted(moved, key=lambda m: -m.bytes)[:20]],
    }


if __name__ == "__main__":
    preset, topology, *numbers = sys.argv[1:]
    print(json.dumps(report(preset, topology, *map(json.loads, numbers))))
