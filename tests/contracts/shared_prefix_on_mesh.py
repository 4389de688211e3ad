"""Updates whose sequences share beginnings on meshes of four CPU devices, compared with an update
of sequences alone on one device: run by test_shared_prefix_on_a_mesh.py.

Prints a JSON object: for each mesh the tokens of the sequences over those computed, the largest
difference of log-probabilities, and of what weights moved by over the norm of the leaf.
"""

import json
import sys

import jax
import learners
import numpy as np
import shared_prefixes
from oracles import configuration, random_model

from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from rl.training.packing.trees import Sharing

SIZES = learners.SIZES | {"num_hidden_layers": 2}
MODELS = {
    "Llama": configuration("Llama", **SIZES | {"num_key_value_heads": 4}),
    "DeepseekV3": configuration(
        "DeepseekV3", **SIZES | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    ),
}
MESHES = {
    "data": ("Llama", {"data": 4}, {}),
    "fsdp and tensor": ("Llama", {"fsdp": 2, "tensor": 2}, {}),
    "explicit": ("Llama", {"fsdp": 2, "tensor": 2}, {}),
    "all-gather": ("Llama", {"fsdp": 2, "context": 2}, {"context_parallel": "all_gather"}),
    "ring": ("Llama", {"context": 4}, {"context_parallel": "ring"}),
    "ulysses": ("Llama", {"fsdp": 2, "context": 2}, {"context_parallel": "ulysses"}),
    "balanced ring": (
        "Llama",
        {"context": 2},
        {"context_parallel": "ring", "context_load_balance": True},
    ),
    "experts": ("DeepseekV3", {"fsdp": 2, "expert": 2}, {"expert_parallel": "all_to_all"}),
    "latent context": ("DeepseekV3", {"expert": 2, "context": 2}, {}),
}


def moved(family: str, mesh, how: dict, sharing) -> tuple:
    """(tokens over those computed, log-probabilities, what each weight moved by)."""
    model = random_model(
        families.read(MODELS[family]), runtime=Runtime(**{"remat": "full"} | how), mesh=mesh
    )
    router = {"bias_rate": 0.05} if family == "DeepseekV3" else {}
    options = learners.stage({"name": "grpo", "kl_coef": 0.1}, router=router)
    trainer, state = learners.begin(model, options, fresh=True)
    trainer.sharing = sharing
    data, before = shared_prefixes.groups(learners.VOCAB), learners.host(state.policy.params)
    logp = trainer.logprobs(state.policy.params, data)[0]
    state, metrics = trainer.update(state, data)
    after = learners.host(state.policy.params)
    shared = float(metrics.get("perf/shared_prefix", 1))
    return shared, logp, {path: after[path] - before[path] for path in after}


def compare(names: list[str]) -> dict:
    expected, result = {}, {}
    for name in names:
        family, degrees, how = MESHES[name]
        if family not in expected:
            expected[family] = moved(
                family, layout({"fsdp": 1}, devices=jax.devices()[:1]), {}, None
            )
        devices = jax.devices()[: int(np.prod(list(degrees.values())))]
        mesh = layout(degrees, devices=devices, explicit=name == "explicit")
        _, logp, weights = expected[family]
        shared, other, others = moved(family, mesh, how, Sharing(length_factor=2))
        result[name] = {
            "shared": shared,
            "logp": float(np.abs(other - logp).max()),
            "weights": max(shared_prefixes.differences(weights, others).values()),
        }
    return result


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps(compare(json.loads(sys.argv[1]) if len(sys.argv) > 1 else list(MESHES))))
