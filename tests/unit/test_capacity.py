"""Experts of limited capacity against a loop, and what a run may do with them."""

from functools import partial

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from flax import nnx

from policy.cache.step import Step
from policy.config import DecoderConfig, Moe, Norm, Router, Runtime
from policy.experts.capacity import capacity, within_capacity
from policy.experts.moe import MixtureOfExperts

E, F, X, K = 6, 5, 4, 2


def loop(x, experts, weights, segments, w, factor):
    """(out, choices dropped) of the definition: a counter for each expert and row of the batch, and
    survivors as they are.
    """
    B, T, _ = x.shape
    out, dropped = np.zeros(x.shape), 0
    limit = int(max(np.ceil(T * K / X) * factor, factor))
    for b in range(B):
        taken = np.zeros(X, int)
        for t in range(T):
            for j in range(K):
                e = experts[b, t, j]
                if segments[b, t]:
                    taken[e] += 1
                    if taken[e] <= limit:
                        gate, up = x[b, t] @ w["gate"][e], x[b, t] @ w["up"][e]
                        out[b, t] += (
                            weights[b, t, j] * (gate / (1 + np.exp(-gate)) * up) @ w["down"][e]
                        )
                    else:
                        dropped += 1
    return out, dropped


def layer(seed=0):
    spec = Moe(Router(X, K, score="sigmoid", renormalize=True), F)
    with nnx.use_eager_sharding(False):
        config = DecoderConfig(16, E, (), Norm(), "none", "{}", initializer_range=0.7)
        return MixtureOfExperts(spec, config, nnx.Rngs(seed))


@partial(jax.jit, static_argnums=(0, 4))
def run(graph, weights, x, segments, runtime):
    """(what the router chose, what the layer returns)."""
    module = nnx.merge(graph, weights)
    return module.router(x.reshape(-1, E))[:2], module(x, Step(segments, segments), runtime)


def inputs(B=3, T=7):
    rng = np.random.default_rng(1)
    segments = (np.arange(T) < np.array([[T], [4], [1]])[:B]).astype(np.int32) * (
        1 + (np.arange(T) > 2)
    )
    return rng.normal(size=(B, T, E)).astype(np.float32), segments


@pytest.mark.parametrize("factor", [0.3, 0.75, 1.2])
def test_a_capacity_mixture_is_the_loop_over_tokens(factor):
    module, (x, segments) = layer(), inputs()
    chosen, (out, aux) = run(*nnx.split(module), x, segments, Runtime(capacity_factor=factor))
    experts, weights = (np.asarray(a).reshape(*segments.shape, -1) for a in chosen)
    w = {
        name: np.asarray(getattr(module, f"expert_{name}_proj")[...])
        for name in ("gate", "up", "down")
    }
    expected, dropped = loop(x, experts, weights, segments, w, factor)
    assert dropped > 0 and 0 < aux.routing.dropped == dropped < K * (segments != 0).sum()
    np.testing.assert_allclose(np.asarray(out), expected, atol=1e-5)
    np.testing.assert_array_equal(
        aux.routing.counts, np.bincount(experts[segments != 0].ravel(), minlength=X)
    )


@pytest.mark.slow
def test_a_large_factor_drops_nothing_and_small_ones_have_the_gradient_of_what_is_left():
    module, (x, segments) = layer(), inputs()
    graph, weights = nnx.split(module)
    step = Step(jnp.asarray(segments), jnp.asarray(segments))
    valid = (segments != 0)[..., None]

    @partial(jax.jit, static_argnums=2)
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def value_and_gradient(weights, x, runtime):
        out, aux = nnx.merge(graph, weights)(x, step, runtime)
        return jnp.sum(valid * out * jnp.cos(jnp.arange(E))), aux.routing.dropped

    def both(runtime, x=x):
        return value_and_gradient(weights, x, runtime)

    ((plain, absent), gradient), ((large, none), same) = (
        both(Runtime()),
        both(Runtime(capacity_factor=X / K)),
    )
    assert absent is None and none == 0
    for a, b in zip(
        jax.tree.leaves((plain, gradient)), jax.tree.leaves((large, same)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    small = both(Runtime(capacity_factor=0.5))[1][1]
    for t, b in np.argwhere(segments.T != 0)[::5]:
        nudge = np.zeros_like(x)
        nudge[b, t] = 1e-2 * np.random.default_rng(t).normal(size=E)
        ends = [
            float(both(Runtime(capacity_factor=0.5), x + sign * nudge)[0][0]) for sign in (1, -1)
        ]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2, np.sum(small * nudge), atol=2e-4)


def test_places_go_to_earlier_tokens_and_of_one_token_to_earlier_choices():
    experts = jnp.asarray([[[0, 1], [1, 0], [0, 2], [3, 0]], [[4, 4], [4, 4], [2, 1], [2, 1]]])
    assert (
        capacity(4, 2, 4, 1.0) == 2
        and capacity(1, 1, 8, 1.25) == 1
        and capacity(100, 2, 8, 1.25) == 31
    )
    np.testing.assert_array_equal(
        within_capacity(experts, 4, 1.0),
        [[[0, 1], [1, 0], [4, 2], [3, 4]], [[4, 4], [4, 4], [2, 1], [2, 1]]],
    )
    np.testing.assert_array_equal(
        within_capacity(experts, 4, 0.5),
        [[[0, 1], [4, 4], [4, 2], [3, 4]], [[4, 4], [4, 4], [2, 1], [4, 4]]],
    )


@pytest.mark.slow
def test_updates_drop_and_log_it_while_scoring_and_generating_do_not():
    model, data = learners.experts(), learners.batch()
    trainer, state = learners.begin(
        model, learners.stage("sft", router={"capacity_factor": 0.5}), fresh=True
    )
    scored, _ = trainer.logprobs(state.policy.params, data)
    plain = np.asarray(model.logprobs(data.tokens, segments=data.segments)[0])
    np.testing.assert_allclose(scored, plain, atol=1e-5)
    _, metrics = trainer.update(state, data)
    assert 0.05 < float(metrics["moe/dropped"]) < 0.9
    free, state = learners.begin(model, learners.stage("sft"))
    assert "moe/dropped" not in free.update(state, data)[1]
