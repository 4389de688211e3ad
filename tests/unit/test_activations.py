"""The estimate of what a remat policy keeps, next to what jax keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import configuration

from policy import families, modes
from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
from policy.config import Runtime
from policy.huggingface.peft.targets import resolved
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.accounting.activations import Activations
from rl.run.resume.remat import ORDER

SHAPE = (4, 64)
# Wide layers, so that what lies outside of them counts little.
SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 160}
KINDS = {
    "Llama": SIZES,
    "Gemma2": SIZES,
    "DeepseekV3": {"num_hidden_layers": 4},
    "Qwen3Moe": {"num_hidden_layers": 4},
    "Qwen3Next": {"num_hidden_layers": 4},
}


def kept(graph, adapters=None) -> int:
    """Returns the bytes that jax keeps of the layers of a decoder, without its weights, for the
    gradient of these or of an adapter."""
    tokens = jnp.zeros(SHAPE, int)
    step = modes.make_step(tokens)
    learning, base = (graph, {}) if adapters is None else (adapters, graph.shapes)

    def vjp(learning, base):
        def hidden(learning):
            return graph.decoder(base | learning)(tokens, step, None, graph.runtime)[0].sum()

        return jax.vjp(hidden, learning)

    program = jax.make_jaxpr(vjp)(learning.shapes, base).jaxpr
    values = {each for each in program.outvars if not hasattr(each, "val")}
    own = values - {*program.invars, *program.constvars}
    # The stacked values of layers; others are those of embedding, final norm and rotations.
    return sum(
        v.aval.size * v.aval.dtype.itemsize for v in own if v.aval.size > np.prod(SHAPE) * 64
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_near_what_jax_keeps(kind):
    """Never much less, so that a chosen policy fits, and at most three times as much."""
    config = families.read(configuration(kind, **KINDS[kind]))
    sizes = []
    for policy in ORDER:
        graph = Graph(config, Runtime(remat=policy), layout({"fsdp": 1}))
        B, T = SHAPE
        estimate = Activations(graph).kept(policy, T) * B * T
        sizes.append(estimate)
        assert 0.9 * kept(graph) < estimate < 3.0 * kept(graph), (policy, estimate, kept(graph))
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_of_an_adapted_product_the_sum_is_kept(kind):
    """Not both of its parts, so that an adapter needs no more than its base."""
    config = families.read(configuration(kind, **KINDS[kind]))
    for remat in ("none", "minimal_flash"):
        graph = Graph(config, Runtime(remat=remat), layout({"fsdp": 1}))
        adapted = graph.with_runtime(adapter=resolved(graph, AdapterSpec(rank=4)))
        assert kept(adapted, Adapters(adapted)) == kept(graph)
