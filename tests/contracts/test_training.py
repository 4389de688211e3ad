"""Every family learns: one GRPO step under scan with remat moves every weight, and the layers may
be unrolled instead.
"""

import dataclasses

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from oracles import KINDS, by_kind, floats_and_integers, random_model, short

from policy import families
from policy.config import Runtime
from policy.modes import make_step

# Weights without a gradient, by the end of their path: moved by a rule of their own; choosing keys
# has no derivative; constants.
WITHOUT_GRADIENT = (
    "router.correction_bias",
    "router.token_experts",
    "mixer.indexer.wq_b",
    "mixer.indexer.wk",
    "mixer.indexer.k_norm.weight",
    "mixer.indexer.k_norm.bias",
    "mixer.indexer.weights_proj",
    "mixer.indexer.q_proj",
    "mixer.indexer.k_proj",
    "mixer.indexer.q_norm.weight",
    "mixer.indexer.q_b_proj",
    "mixer.indexer.compressor.kv_proj",
    "mixer.indexer.compressor.gate_proj",
    "mixer.indexer.compressor.position_bias",
    "mixer.indexer.compressor.kv_norm.weight",
    "scalar",
    "layer_embeddings.table",  # frozen by default
)


def model_of(kind, **runtime):
    return random_model(families.read(short(kind)), runtime=Runtime(**runtime))


@pytest.mark.parametrize("kind", by_kind(always=("Llama",)))
def test_one_grpo_step_moves_every_weight_that_learns(kind):
    model = model_of(kind)
    assert model.graph.runtime.scan and model.graph.runtime.remat == "full"
    options = learners.stage("grpo", optimizer={"eps": 1e-8}, router={"bias_rate": 0.0})
    trainer, state = learners.begin(model, options, fresh=True)
    state, metrics = trainer.update(state, learners.batch(rows=6, length=16, group=3))
    assert np.isfinite(float(metrics["loss"])) and float(metrics["optim/skipped"]) == 0
    for path, before in model.params.items():
        after, before = np.asarray(state.policy.params[path]), np.asarray(before)
        stacked = path.startswith("stacks.")
        for layer, (new, old) in enumerate(
            zip(after, before, strict=True) if stacked else [(after, before)]
        ):
            moved = bool((new != old).any())
            assert moved != path.endswith(WITHOUT_GRADIENT), (
                f"{path}, layer {layer}: {'moved' if moved else 'no gradient'}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_scanned_layers_are_those_of_unrolled_ones(kind):
    model, data = model_of(kind), learners.batch(rows=3, length=16)
    weight = np.random.default_rng(0).normal(size=data.tokens.shape).astype(np.float32)

    def gradient(runtime):
        graph = type(model.graph)(model.config, runtime, model.graph.layout)

        def loss(floats):
            step = make_step(data.tokens, segments=data.segments)
            logp, entropy, _ = graph.logprobs(integers | floats, data.tokens, step, 0.9)
            return jnp.sum(weight * logp + entropy)

        floats, integers = floats_and_integers(model.params)
        return jax.jit(jax.grad(loss))(floats)

    scanned, plain = (
        gradient(Runtime()),
        gradient(dataclasses.replace(Runtime(), scan=False, remat="none")),
    )
    # Some are 0 but for rounding: a bias of all keys shifts the scores of a query, which no softmax
    # sees.
    largest = {path: float(jnp.abs(gradient).max()) for path, gradient in plain.items()}
    for path, expected in plain.items():
        scale = max(1e-3 * max(largest.values()), largest[path])
        np.testing.assert_allclose(
            np.asarray(scanned[path]), expected, atol=1e-4 * scale, rtol=0, err_msg=path
        )
