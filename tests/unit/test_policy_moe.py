"""Mixture of experts: the grouped products in every layout, the routers, their statistics and the
update of the bias."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from policy.config import ClampedSwiglu, DecoderConfig, Moe, Norm, Router, Runtime
from policy.experts import experts, grouped, moe
from policy.experts.experts import AXES
from policy.experts.router import bias_update, routing_statistics
from policy.ops import quantization

N, k, G, E, F = 11, 2, 5, 6, 7
CHOICES = {
    "mixed": np.random.default_rng(0).permuted(np.tile(np.arange(G), (N, 1)), axis=1)[:, :k],
    "two_experts_empty": np.random.default_rng(1).permuted(np.tile([0, 2, 4], (N, 1)), axis=1)[
        :, :k
    ],
    "all_to_two": np.tile([3, 1], (N, 1)),
    "only_the_last": np.full((N, 1), G - 1),
}


@partial(jax.jit, static_argnames=("block", "partial"))
def mixture_and_gradients(x, w, weights, choices, cotangent, block, partial=False):
    """(out, d x, d w, d weights) of sum(out * cotangent), with the groups that w has."""

    def mixture(x, w, weights):
        plan = grouped.plan(choices, w.shape[0], block=block, partial=partial)
        return grouped.combine(
            grouped.product(grouped.dispatch(x, plan), w, plan, Runtime()), weights, plan
        )

    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(mixture, x, w, weights)
        return out, *vjp(cotangent)


def loop(x, w, weights, choices):
    """The definition, one choice after the other."""
    out = np.zeros((x.shape[0], w.shape[2]))
    for n, row in enumerate(choices):
        for j, g in enumerate(row):
            out[n] += weights[n, j] * (x[n] @ w[g])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_every_layout_computes_the_definition_and_its_gradient(name):
    choices, rng = CHOICES[name], np.random.default_rng(2)
    shapes = ((N, E), (G, E, F), choices.shape, (N, F))
    x, w, weights, cotangent = (rng.normal(size=s).astype(np.float32) for s in shapes)
    expected = loop(x, w, weights, choices)
    d_x, d_w, d_weights = np.zeros(x.shape), np.zeros(w.shape), np.zeros(weights.shape)
    for n, row in enumerate(choices):
        for j, g in enumerate(row):
            d_x[n] += weights[n, j] * w[g] @ cotangent[n]
            d_w[g] += weights[n, j] * np.outer(x[n], cotangent[n])
            d_weights[n, j] += x[n] @ w[g] @ cotangent[n]
    for block in (1, 4, 64, None):
        result = mixture_and_gradients(x, w, weights, choices, cotangent, block)
        for a, b in zip(result, (expected, d_x, d_w, d_weights), strict=True):
            np.testing.assert_allclose(
                np.asarray(a), b, atol=1e-5, rtol=1e-5, err_msg=f"block {block}"
            )


@pytest.mark.parametrize("name", ["mixed", "only_the_last"])
def test_choices_of_other_groups_add_nothing_and_what_stands_in_their_rows_is_never_seen(
    name, monkeypatch
):
    """Kernels leave rows past the last group as they find them: here as NaN, in products and in
    their gradients."""
    ragged_dot = jax.lax.ragged_dot

    @jax.custom_vjp
    def unmasked(rows, w, sizes):
        return spoilt(ragged_dot(rows, w, sizes), sizes)

    def spoilt(rows, sizes):
        return jnp.where((jnp.arange(rows.shape[0]) < sizes.sum())[:, None], rows, jnp.nan)

    def backward(saved, g):
        rows, w, sizes = saved
        d_rows, d_w = jax.vjp(lambda rows, w: ragged_dot(rows, w, sizes), rows, w)[1](g)
        return spoilt(d_rows, sizes), d_w, None

    unmasked.defvjp(lambda *saved: (unmasked(*saved), saved), backward)
    monkeypatch.setattr(jax.lax, "ragged_dot", unmasked)
    choices, rng, held = CHOICES[name], np.random.default_rng(2), 3
    shapes = ((N, E), (held, E, F), choices.shape, (N, F))
    x, w, weights, cotangent = (rng.normal(size=s).astype(np.float32) for s in shapes)
    full = np.concatenate([w, np.zeros((G - held, E, F), np.float32)])
    expected = [
        np.array(a) for a in mixture_and_gradients(x, full, weights, choices, cotangent, block=1)
    ]
    expected[2] = expected[2][:held]
    expected[3][choices >= held] = 0
    for block in (4, None):
        result = mixture_and_gradients(x, w, weights, choices, cotangent, block, partial=True)
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(a), b, atol=1e-5, rtol=1e-5, err_msg=f"block {block}"
            )


@pytest.mark.parametrize("block", [1, 4, 64])
def test_a_plan_gives_every_choice_a_row_of_its_group(block):
    for choices in CHOICES.values():
        plan = grouped.plan(jnp.asarray(choices), G, block=block)
        rows, token = np.asarray(plan.row), np.asarray(plan.token)
        assert len(set(rows.ravel())) == rows.size, "two choices share a row"
        np.testing.assert_array_equal(
            token[rows], np.broadcast_to(np.arange(N)[:, None], rows.shape)
        )
        np.testing.assert_array_equal(np.asarray(plan.block_group)[rows // block], choices)
        assert (token == N).sum() == token.size - rows.size
        np.testing.assert_array_equal(plan.sizes, np.bincount(choices.ravel(), minlength=G))


@pytest.mark.parametrize(("tokens", "groups"), [(1, 8), (8, 8), (500, 8), (50_000, 8)])
def test_a_block_is_a_power_of_two_up_to_64(tokens, groups):
    block = grouped.block_rows(tokens, 2, groups, "cpu")
    assert block in (1, 2, 4, 8, 16, 32, 64) and block <= max(1, 2 * tokens // groups)


def test_few_tokens_go_through_every_expert_on_tpu():
    assert [experts.small_batch(tokens, "tpu") for tokens in (1, 256, 257)] == [True, True, False]
    assert not experts.small_batch(1, "cpu") and not experts.small_batch(1, "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, "int8"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"bias": True, "clamp": ClampedSwiglu(limit=1.5)},
        {"clamp": ClampedSwiglu(limit=1.5, alpha=1.0, up_offset=0.0)},
        {"weigh": "input"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CHOICES)
def test_through_every_expert_is_the_same_as_through_the_chosen_ones(name, keys, rule):
    """Values and all gradients; choices past the experts that are there add nothing."""
    choices, rng, held = CHOICES[name], np.random.default_rng(2), G - 1
    spec, runtime = (
        Moe(Router(experts=held, experts_per_token=choices.shape[1]), F, **keys),
        Runtime(),
    )
    shapes = {"gate": (held, E, F), "up": (held, E, F), "down": (held, F, E)}
    if "bias" in keys:
        shapes |= {"gate_bias": (held, F), "up_bias": (held, F), "down_bias": (held, E)}
    weights = {
        key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()
    }
    if rule:
        weights |= {
            key: quantization.quantize(weights[key], jnp.int8, (1,))
            for key in AXES
            if key in weights and "bias" not in key
        }
    x, cotangent = (jnp.asarray(rng.normal(size=(N, E)), jnp.float32) for _ in range(2))
    share = jnp.asarray(rng.uniform(0.1, 1.0, choices.shape), jnp.float32)

    def chosen(x, share, weights):
        routed = experts.route((x, choices, share), spec, groups=held, block=None, partial=True)
        return experts.unroute(experts.compute(weights, routed, spec, runtime))

    def every(x, share, weights):
        return experts.through_every((x, jnp.asarray(choices), share), weights, held, spec, runtime)

    with jax.default_matmul_precision("highest"):
        if rule:
            result, expected = (f(x, share, weights) for f in (every, chosen))
        else:
            result, expected = (jax.vjp(f, x, share, weights) for f in (every, chosen))
            result, expected = ((out, vjp(cotangent)) for out, vjp in (result, expected))
    assert np.abs(jax.tree.leaves(expected)[0]).max() > 0.1 or name == "only_the_last"
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), result, expected
    )


def router(seed=0, **keys):
    spec = Router(experts=8, experts_per_token=2, **keys)
    config = DecoderConfig(16, E, (), Norm(), "none", "{}", initializer_range=1.0)
    with nnx.use_eager_sharding(False):
        layer = moe.TopKRouter(spec, config, nnx.Rngs(seed))
    if spec.correction_bias:
        layer.correction_bias[...] = jnp.asarray(
            np.random.default_rng(1).normal(0, 0.3, 8), jnp.float32
        )
    return layer


def test_a_sigmoid_router_chooses_with_the_bias_and_weighs_without():
    layer = router(
        score="sigmoid",
        correction_bias=True,
        groups=4,
        topk_groups=2,
        group_score="top2",
        renormalize=True,
        scale=2.5,
    )
    x = np.random.default_rng(3).normal(size=(40, E)).astype(np.float32)
    experts, weights, scores = (np.asarray(a) for a in layer(jnp.asarray(x)))
    s = 1 / (1 + np.exp(-x.astype(np.float64) @ np.asarray(layer.weight[...], np.float64)))
    np.testing.assert_allclose(scores, s, atol=1e-5)
    choice = s + np.asarray(layer.correction_bias[...])
    differs = 0
    for n in range(40):
        best = np.argsort(-choice[n].reshape(4, 2).sum(1))[:2]
        eligible = [e for e in range(8) if e // 2 in best]
        expected = sorted(eligible, key=lambda e: -choice[n, e])[:2]
        assert sorted(experts[n]) == sorted(expected)
        np.testing.assert_allclose(
            weights[n], 2.5 * s[n, experts[n]] / s[n, experts[n]].sum(), atol=1e-5
        )
        differs += sorted(expected) != sorted(np.argsort(-s[n])[:2])
    assert differs > 5, "neither the bias nor the groups decided anything"


def test_the_choice_has_no_gradient_but_the_weights_do():
    layer = router(score="sigmoid", correction_bias=True)
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(5, E)), jnp.float32)
    gradient = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x)[1] ** 2))(state)
    assert (
        np.abs(gradient["weight"][...]).max() > 0
        and not np.asarray(gradient["correction_bias"][...]).any()
    )


def test_routing_statistics_leave_padding_out():
    rng = np.random.default_rng(4)
    B, T, X = 3, 6, 5
    experts = rng.permuted(np.tile(np.arange(X), (B, T, 1)), axis=2)[..., :2]
    scores = rng.random((B, T, X)).astype(np.float32)
    segments = np.array([[1] * 6, [1, 1, 2, 2, 0, 0], [0] * 6])
    result = routing_statistics(jnp.asarray(experts), jnp.asarray(scores), jnp.asarray(segments))
    counts, balance = np.zeros(X), 0.0
    for b, segment in [(0, 1), (1, 1), (1, 2)]:
        tokens = [t for t in range(T) if segments[b, t] == segment]
        chosen = np.bincount(experts[b, tokens].ravel(), minlength=X)
        share = (scores[b, tokens] / scores[b, tokens].sum(-1, keepdims=True)).mean(0)
        counts += chosen
        balance += (X / (2 * len(tokens)) * chosen * share).sum()
    np.testing.assert_array_equal(result.counts, counts)
    np.testing.assert_allclose(result.balance, balance, rtol=1e-5)


def test_balance_is_one_for_even_use_and_its_gradient_reaches_the_scores():
    experts = jnp.arange(4).reshape(1, 4, 1)
    even = jnp.full((1, 4, 4), 0.25)

    @jax.jit
    @jax.value_and_grad
    def balance(scores, experts):
        return routing_statistics(experts, scores, jnp.ones((1, 4), int)).balance

    np.testing.assert_allclose(balance(even, experts)[0], 1.0, rtol=1e-6)
    uneven = jnp.asarray([[[0.7, 0.1, 0.1, 0.1]] * 4])
    value, gradient = balance(uneven, jnp.zeros_like(experts))
    assert value > 2.0
    assert (gradient[..., 0] > 0).all() and (gradient[..., 1:] < 0).all()


def test_the_bias_moves_towards_even_use():
    bias = jnp.asarray([[0.0, 0.1, -0.2, 0.3], [0.0, 0.0, 0.0, 0.0]])
    counts = jnp.asarray([[9.0, 5.0, 1.0, 5.0], [4.0, 4.0, 4.0, 4.0]])
    result = bias_update(bias, counts, 0.01)
    np.testing.assert_allclose(result, [[-0.01, 0.1, -0.19, 0.3], [0.0] * 4], atol=1e-7)
