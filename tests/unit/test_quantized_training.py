"""Training with a rule: it learns, scanned and remat change nothing, and what is not to be
quantised keeps its bits."""

import itertools

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from oracles import random_model, short

from policy import families, modes
from policy.config import Runtime
from policy.model import Graph
from policy.ops.quantization import RULES


def logp_gradients(model, **runtime):
    """(log-probabilities, Aux, gradients by path) of a packed batch with padding."""
    graph = Graph(model.config, Runtime(**runtime), model.graph.layout)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (2, 12))
    step = modes.make_step(tokens, segments=np.asarray([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3]))
    weight = rng.normal(size=tokens.shape)
    still = {path: model.params[path] for path in graph.untrained}

    def loss(trained):
        logp, _, aux = graph.logprobs(trained | still, tokens, step, 1.0)
        return jnp.sum(logp * weight), (logp, aux)

    trained = {path: array for path, array in model.params.items() if path not in graph.untrained}
    grads, (logp, aux) = jax.jit(jax.grad(loss, has_aux=True))(trained)
    return logp, aux, grads


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        pytest.param(kind, rule, marks=pytest.mark.slow)
        for kind, rule in [
            ("Mixtral", "int8"),
            *zip(
                ("Llama", "DeepseekV3", "Qwen3Next", "Gemma2"), itertools.cycle(RULES), strict=False
            ),
        ]
    ],
)
def test_scanned_layers_under_remat_are_unrolled_ones(kind, rule):
    model = random_model(families.read(short(kind)))
    scanned = logp_gradients(model, quantization=rule, scan=True, remat="full")
    unrolled = logp_gradients(model, quantization=rule, scan=False, remat="none")
    np.testing.assert_allclose(scanned[0], unrolled[0], atol=1e-5)
    for path, result in scanned[2].items():
        expected = np.asarray(unrolled[2][path])
        assert np.linalg.norm(result - expected) <= 1e-4 * np.linalg.norm(expected) + 1e-6, path


@pytest.mark.slow
def test_routers_norms_and_head_keep_their_bits():
    """With weights of 0 where quantisation may act, it changes no number: all that is left are the
    products it may not touch.
    """
    model = random_model(families.read(short("Mixtral")))
    model.params |= {path: jnp.zeros_like(model.params[path]) for path in model.graph.inputs}
    plain, ruled = logp_gradients(model), logp_gradients(model, quantization="int8")
    np.testing.assert_array_equal(plain[0], ruled[0])
    assert learners.same_bits(learners.host(plain[1]), learners.host(ruled[1]))
    left = {
        path
        for path, grad in plain[2].items()
        if np.any(np.asarray(grad)) and path not in model.graph.inputs
    }
    assert {"norm.weight", "lm_head", "embed_tokens"} <= left
    assert all(
        np.asarray(plain[2][path]).tobytes() == np.asarray(ruled[2][path]).tobytes()
        for path in left
    )


@pytest.mark.parametrize(
    "rule",
    [
        "int8",
        pytest.param("fp8", marks=pytest.mark.slow),
        pytest.param("fp8_full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "made", [learners.dense, pytest.param(learners.experts, marks=pytest.mark.slow)]
)
def test_a_model_learns_with_a_rule(made, rule):
    model = made(runtime=Runtime(remat="none", scan=False, quantization=rule))
    trainer, state = learners.begin(model, learners.stage("sft", router={"bias_rate": 0.0}))
    batch, losses = learners.batch(rows=4), []
    for _ in range(8):
        state, metrics = trainer.update(state, batch)
        losses.append(float(metrics["loss"]))
        assert float(metrics["optim/skipped"]) == 0
    assert losses[-1] < losses[0] - 0.2, losses
    assert {str(a.dtype) for a in state.policy.params.values()} == {"float32"}
