"""A paged cache on a mesh of four CPU devices, compared with one: run by test_pages_on_a_mesh.py.

Rows, their pages, and heads are cut over the devices. Prints a JSON object: for the portable form and for the kernel for latents,
which is interpreted, the largest difference of hidden states after the prompt, and over how many devices the pools are cut.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from oracles import KINDS, configuration, random_model, tokens

from policy import cache as caches
from policy import families
from policy.cache import Step
from policy.layers import paged_attention
from policy.pages import Pages
from policy.sharding import Layout, layout, settle

B, T, PROMPT, SIZE, NUMBER = 4, 14, 10, 8, 12
# The second half of the rows has its pages in the second half of the pool.
TABLE = np.array([[5, 2], [3, 1], [9, 11], [7, 8]], np.int32)


def computed(mesh):
    """(hidden [B, T, E] of a prompt and then of one token at a time, devices that hold different parts of a pool)."""
    config = families.read(configuration("DeepseekV3", **KINDS["DeepseekV3"].short | {"kv_lora_rank": 128}))
    model = random_model(config, seed=3, mesh=mesh)
    graph, rows = model.graph, tokens(B, T, seed=1)

    def empty():
        return caches.constrained(caches.create(config, B, Pages(NUMBER, SIZE), "float32", scan=True), graph.layout)

    @jax.jit
    def run(params, rows, step, cache):
        with graph.precision():
            hidden, cache, _ = graph.decoder(params)(rows, step, cache, graph.runtime)
        return hidden, caches.constrained(cache, graph.layout)

    cache, hidden = settle(jax.jit(empty)(), graph.layout), []
    for start, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, T))]:
        positions = jnp.broadcast_to(jnp.arange(start, end), (B, end - start))
        step = Step(positions, jnp.ones_like(positions), pages=jnp.asarray(TABLE))
        found, cache = settle(run(model.params, rows[:, start:end], step, cache), graph.layout)
        hidden.append(np.asarray(found))
    pool = jax.tree.leaves(cache)[0]
    return np.concatenate(hidden, axis=1), len({str(index) for index in pool.sharding.devices_indices_map(pool.shape).values()})


def compare() -> dict:
    expected, _ = computed(None)
    expected = expected[:, PROMPT:]
    mesh, found, calls = layout({"expert": 2, "tensor": 2}), {}, []
    hidden, cut = computed(mesh)
    found["portable"] = {"difference": float(np.abs(hidden[:, PROMPT:] - expected).max()), "cut": cut}
    kernel = paged_attention.latent_kernel
    paged_attention.latent_kernel = lambda *args, **how: calls.append(args[1].shape) or kernel(*args, **how)
    Layout.platform = "tpu"
    with pltpu.force_tpu_interpret_mode():
        hidden, cut = computed(mesh)
    found["kernel"] = {"difference": float(np.abs(hidden[:, PROMPT:] - expected).max()), "cut": cut, "pool": calls[0]}
    return found


if __name__ == "__main__":
    print(json.dumps(compare()))
