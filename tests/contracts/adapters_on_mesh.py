"""Adapters on meshes of four CPU devices against one device: run by test_adapters_on_a_mesh.py.

    python adapters_on_mesh.py '[["lora", {"fsdp": 4}, {}], ...]'

Prints a JSON list with the findings of each case: an adapter, a mesh, and fields of the runtime on
it.
"""

import json
import sys
from functools import cache, partial

import jax
import numpy as np
import oracles
from adapted import with_adapter
from oracles import STANDARD, configuration, random_model

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Model
from policy.modes import make_step

SPECS = {
    "lora": AdapterSpec(rank=4, alpha=6.0),
    "shared": AdapterSpec(rank=4, alpha=6.0, experts="shared"),
    "dora": AdapterSpec(rank=4, alpha=6.0, dora=True),
    "dora, shared": AdapterSpec(rank=4, alpha=6.0, dora=True, experts="shared"),
}
B = 8
T = 12


def model_of(spec: str, mesh=None, how: dict | None = None) -> Model:
    """Two layers of latent attention with 8 experts and a shared one, under an adapter."""
    keys = {"num_hidden_layers": 2, "first_k_dense_replace": 0, "initializer_range": 0.05}
    config = families.read(configuration("DeepseekV3", **STANDARD["DeepseekV3"] | keys))
    model = random_model(config, mesh=mesh, runtime=Runtime(**(how or {})))
    return with_adapter(model, SPECS[spec], size=0.05)


def computed(model: Model):
    """(log-probabilities, gradients of the arrays that learn) of packed and padded rows."""
    rng = np.random.default_rng(0)
    tokens = oracles.tokens(B, T)
    filled = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    segments = (np.where(np.arange(T) < T // 2, 1, 2) * filled).astype(np.int32)
    cotangent = rng.normal(size=(B, T)).astype(np.float32)
    adapter = {path: a for path, a in model.params.items() if path not in model.graph.paths}
    base = {path: a for path, a in model.params.items() if path in model.graph.paths}

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(adapter, base, tokens, segments):
        step = make_step(tokens, segments=segments)
        logp, entropy, _ = model.graph.logprobs(base | adapter, tokens, step, 0.9)
        return (cotangent * logp + entropy).sum(), logp

    (_, logp), gradient = jax.block_until_ready(loss(adapter, base, tokens, segments))
    return np.asarray(logp), {path: np.asarray(g) for path, g in gradient.items()}


@cache
def on_one_device(spec: str):
    return computed(model_of(spec))


def compare(spec: str, degrees: dict, how: dict) -> dict:
    """The largest difference of a log-probability, and that of a gradient as a share of the largest
    number of its array."""
    logp, gradients = on_one_device(spec)
    model = model_of(spec, layout(degrees), how)
    other, others = computed(model)
    differences = {
        path: float(np.abs(others[path] - g).max() / np.abs(g).max())
        for path, g in gradients.items()
    }
    worst = max(differences, key=lambda path: differences[path])
    return {
        "logp": float(np.abs(other - logp).max()),
        "worst": worst,
        "gradient": differences[worst],
        "cut": sorted(
            path
            for path, a in model.params.items()
            if path in gradients and not a.sharding.is_fully_replicated
        ),
    }


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps([compare(*case) for case in json.loads(sys.argv[1])]))
