"""Attention in blocks on a mesh of four CPU devices, compared with the dense form on one: run by
test_blocks_on_a_mesh.py.

Prints a JSON object: for each mesh the largest difference of log-probabilities and of gradients
(over the largest gradient), and the kinds of collectives inside the loops over blocks.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from oracles import configuration, random_model, tokens
from tree_rows import trees

from policy import families
from policy.attention import block_attention
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.modes import make_step

MESHES = {
    "rows": ({"fsdp": 4}, {}, "Llama"),
    "heads": ({"fsdp": 2, "tensor": 2}, {}, "Llama"),
    "query heads alone": (
        {"tensor": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        "Llama",
    ),
    "explicit": ({"fsdp": 2, "tensor": 2}, {}, "Llama"),
    "latent": ({"fsdp": 2, "tensor": 2}, {}, "DeepseekV3"),
}
T = 40
ROWS = (
    [(5, [(3, []), (20, [(1, []), (4, [])])]), (2, [(1, []), (2, [])])],
    [(16, [(7, []), (9, [])]), (1, [(2, [])])],
) * 2


def computed(mesh, family, sizes):
    """The log-probabilities, the gradients of their squares, and the program."""
    config = families.read(configuration(family, num_hidden_layers=2, **sizes))
    model = random_model(config, runtime=Runtime(remat="none", scan=False), mesh=mesh)
    rows, tree = jnp.asarray(tokens(4, T)), jax.tree.map(jnp.asarray, trees(ROWS, T))
    graph = model.graph
    weights = {path: array for path, array in model.params.items() if path not in graph.untrained}

    def loss(weights, tree):
        logp = graph.logprobs(model.params | weights, rows, make_step(rows, tree=tree), 1.0)[0]
        return jnp.sum(logp**2), logp

    run = jax.jit(jax.grad(loss, has_aux=True)).lower(weights, tree).compile()
    grads, logp = run(weights, tree)
    return {path: np.asarray(grad) for path, grad in grads.items()}, np.asarray(logp), run.as_text()


def in_loops(program: str) -> list[str]:
    """The kinds of collectives inside of loops: layers are unrolled, so that the loops are those
    over blocks."""
    kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    return sorted(
        {match for line in of_loops(program) for match in re.findall(rf" {kinds}[\w-]*\(", line)}
    )


def of_loops(program: str) -> list[str]:
    """The operations of loops of a device."""
    return [line for line in program.splitlines() if "shard_map" in line and "/while/body" in line]


def compare() -> dict:
    result, sizes, long = {}, block_attention.SIZES, 10**6
    for name, (degrees, options, family) in MESHES.items():
        sizes["cpu"] = long
        expected, logp, _ = computed(
            layout({"fsdp": 1}, devices=jax.devices()[:1]), family, options
        )
        sizes["cpu"] = 8
        mesh = layout(degrees, **({"explicit": True} if name == "explicit" else {}))
        grads, other, program = computed(mesh, family, options)
        largest = max(np.abs(grad).max() for grad in expected.values())
        result[name] = {
            "logp": float(np.abs(other - logp).max()),
            "gradient": max(
                float(np.abs(grads[path] - grad).max() / largest) for path, grad in expected.items()
            ),
            "collectives": in_loops(program),
            "loops": len(of_loops(program)),
        }
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps(compare()))
