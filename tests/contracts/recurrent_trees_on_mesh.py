"""Gated delta net and n-gram memory over trees on a mesh of two CPU devices, compared with one: run
by test_recurrent_trees_on_a_mesh.py.

Prints a JSON object: for each model and mesh the largest difference of log-probabilities, and of
gradients over the norm of the leaf.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import shared_prefixes
from oracles import configuration, random_model, short

from policy import families, modes
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.recurrent import delta_rule
from rl.training.packing.trees import Sharing, plan_trees

SECTION = {"layers": [1], "vocab_bases": [50, 70], "heads": 2, "head_dim": 4, "kernel_size": 3}
MODELS = {
    "delta_net": (short("Qwen3Next"), ("fsdp", "tensor", "context"), (False, True)),
    "channel_decays": (short("KimiLinear"), ("tensor", "context"), (False, True)),
    "short_conv": (short("Lfm2"), ("tensor", "context"), (False, True)),
    "groups_of_states": (short("NemotronH"), ("tensor", "context"), (False, True)),
    "memory": (
        configuration("Llama", num_hidden_layers=2, duet={"engram": SECTION}),
        ("fsdp", "context"),
        (False,),
    ),
}


def computed(keys: dict, packing, data, mesh):
    """(log-probabilities, gradients by path)."""
    model = random_model(families.read(keys), runtime=Runtime(remat="full"), mesh=mesh)
    graph, packed = model.graph, jax.tree.map(jnp.asarray, packing.batch(data))
    weights = {path: array for path, array in model.params.items() if path not in graph.untrained}

    def loss(packed, weights):
        step = modes.make_step(packed.tokens, segments=packed.segments, tree=packed.tree)
        decoder = graph.decoder(model.params | weights)
        logp, _, _ = modes.logprobs(decoder, packed.tokens, step, 1.0, graph.runtime)
        return jnp.sum(logp * packed.advantages * packed.mask), logp

    with graph.precision():
        return jax.block_until_ready(
            jax.jit(jax.grad(partial(loss, packed), has_aux=True))(weights)
        )[::-1]


def compare() -> dict:
    delta_rule.CHUNK, result = 16, {}
    for name, (keys, axes, modes_of_mesh) in MODELS.items():
        data = shared_prefixes.groups(keys["vocab_size"])
        packing = plan_trees(data, 4, Sharing(length_factor=2, one_level=True), multiple=2)
        logp, grads = computed(keys, packing, data, None)
        for axis in axes:
            for explicit in modes_of_mesh:
                other, others = computed(keys, packing, data, layout({axis: 2}, explicit=explicit))
                result[f"{name} {axis} {'explicit' if explicit else 'auto'}"] = {
                    "logp": float(np.abs(np.asarray(other) - np.asarray(logp)).max()),
                    "gradient": max(shared_prefixes.differences(grads, others).values()),
                }
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    print(json.dumps(compare()))
