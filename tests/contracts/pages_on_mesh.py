"""A paged cache on a mesh of four CPU devices, compared with one: run by test_pages_on_a_mesh.py.

Rows, their pages, and heads are cut over the devices. The prompts come in two chunks, in another
order than the rows, so that their pages lie with other devices; then all rows get two tokens, then
one, and the last one row after row. The engine hook gets the tokens of all rows in the order of the
prompts. Prints a JSON object: by case the largest difference of hidden states, and over how many
devices the pools are cut.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from oracles import KINDS, configuration, random_model, tokens

from policy import families, hook
from policy.attention import paged_attention
from policy.cache import cache as caches
from policy.cache.pages import Pages
from policy.cache.step import Step
from policy.mesh.sharding import Layout, block_on_cpu_mesh, layout

B, T, PROMPT, CHUNK, SIZE, NUMBER = 4, 26, 22, 11, 8, 20
# The second half of the rows has its pages in the second half of the pool.
TABLE = np.array([[5, 2, 7, 1], [3, 8, 4, 6], [11, 19, 12, 10], [14, 17, 13, 18]], np.int32)
PROMPTS = np.array([2, 0, 3, 1])
# With a kernel for latents; layers with a window next to others; keys that an indexer chooses, and
# the latents of those, for one layer and for two.
CASES = {
    "DeepseekV3": {"kv_lora_rank": 128},
    "Gemma3": {"sliding_window": 5},
    "DeepseekV32": {"index_topk": 3},
    "GlmMoeDsa": {"index_topk": 3},
}


def model_of(kind: str, mesh):
    config = families.read(
        configuration(kind, **KINDS[kind].standard | KINDS[kind].short | CASES[kind])
    )
    return random_model(config, seed=3, mesh=mesh)


def cut_of(cache) -> int:
    """How many devices hold different parts of a pool."""
    pool = jax.tree.leaves(cache)[0]
    return len({str(index) for index in pool.sharding.devices_indices_map(pool.shape).values()})


def computed(kind: str, mesh):
    """(hidden [B, T, E], devices that hold different parts of a pool)."""
    model = model_of(kind, mesh)
    graph, config, text = model.graph, model.config, tokens(B, T, seed=1)

    def empty():
        return caches.constrained(
            caches.create(config, B, Pages(NUMBER, SIZE), "float32", scan=True), graph.layout
        )

    @jax.jit
    def run(params, text, step, cache):
        with graph.precision():
            hidden, cache, _ = graph.decoder(params)(text, step, cache, graph.runtime)
        return hidden, caches.constrained(cache, graph.layout)

    cache, hidden = (
        block_on_cpu_mesh(jax.jit(empty)(), graph.layout),
        np.full((B, T, config.hidden_size), np.nan),
    )
    calls = [(PROMPTS, start, start + CHUNK) for start in range(0, PROMPT, CHUNK)]
    calls += [(np.arange(B), *at) for at in ((PROMPT, PROMPT + 2), (PROMPT + 2, T - 1))]
    calls += [(np.array([row]), T - 1, T) for row in range(B)]
    for rows, start, end in calls:
        positions = jnp.broadcast_to(jnp.arange(start, end), (len(rows), end - start))
        step = Step(
            positions,
            jnp.ones_like(positions),
            pages=jnp.asarray(TABLE[rows]),
            anywhere=start < PROMPT,
        )
        result, cache = block_on_cpu_mesh(
            run(model.params, text[rows, start:end], step, cache), graph.layout
        )
        hidden[rows, start:end] = result
    return hidden, cut_of(cache)


def hooked(kind: str, mesh):
    """The same by the engine hook, before the final norm."""
    model, text = model_of(kind, mesh), tokens(B, T, seed=1)
    run = jax.jit(hook.forward, donate_argnames="caches")
    state, hidden = (
        hook.create_caches(model, NUMBER, SIZE),
        np.full((B, T, model.config.hidden_size), np.nan),
    )
    for start, end in ((0, CHUNK), (CHUNK, PROMPT), (PROMPT, T)):
        request, positions = np.repeat(PROMPTS, end - start), np.tile(np.arange(start, end), B)
        rows = hook.Rows(
            *(
                jnp.asarray(a, jnp.int32)
                for a in (text[request, positions], positions, request, TABLE)
            )
        )
        result, state, _ = block_on_cpu_mesh(run(model, rows, state), model.graph.layout)
        hidden[request, positions] = result
    return hidden, cut_of(state)


def compare() -> dict:
    mesh, result, calls = layout({"expert": 2, "tensor": 2}), {}, []
    expected = {(run, kind): run(kind, None)[0] for kind in CASES for run in (computed, hooked)}

    def different(kind: str, run=computed) -> dict:
        hidden, cut = run(kind, mesh)
        return {"difference": float(np.abs(hidden - expected[run, kind]).max()), "cut": cut}

    result |= {kind: different(kind) for kind in CASES}
    result |= {f"hook of {kind}": different(kind, hooked) for kind in CASES}
    kernel = paged_attention.latent_kernel
    paged_attention.latent_kernel = lambda *args, **how: (
        calls.append(args[1].shape) or kernel(*args, **how)
    )
    Layout.platform = "tpu"
    with pltpu.force_tpu_interpret_mode():
        result["kernel"] = different("DeepseekV3")
        result["kernel"]["pool"] = calls.pop()
        calls.clear()
        result["hook, no kernel"] = different("DeepseekV3", hooked)
    assert not calls, (
        "the kernel of a device reads its own pages, and these rows have pages anywhere"
    )
    return result


if __name__ == "__main__":
    print(json.dumps(compare()))
