"""Products in few bits: the training rules against numpy and against qwix's own provider, and what
they leave alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies

from policy.config import Runtime
from policy.experts.grouped import plan, product
from policy.ops import quantization
from policy.ops.linear import linear, ragged_linear

PRODUCTS = [
    ("bte,ehd->bhtd", (2, 3, 24), (24, 2, 5)),
    ("bhtd,hde->bte", (2, 3, 4, 5), (3, 5, 7)),
    ("...e,ei->...i", (2, 3, 24), (24, 6)),
    ("...e,ei->...i", (1, 24), (24, 6)),
    ("bre,bef->brf", (3, 2, 24), (3, 24, 6)),
]
FORWARD = {"int8": 2e-2, "fp8": 8e-2, "fp8_full": 8e-2}
BACKWARD = {"int8": 1.6e-2, "fp8": 7.5e-2, "fp8_full": 7.5e-2}


def drawn(shape, seed=0):
    """Numbers whose size differs from row to row, so that one scale for all would do badly."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


def letters(equation, x):
    """(of x, of the weight, of the result), with letters for the dots."""
    operands, outs = equation.replace("...", "AB"[: x.ndim - 1]).split("->")
    return *operands.split(","), outs


def quantized_product(xs, ws, outs, x, w):
    """The product of two (numbers, letters) by numpy: integers, the largest of a scale at 127, then
    the scales."""
    return (
        np.einsum(f"{xs},{ws}->{outs}", x[0], w[0]).astype(np.float32)
        * align(x[1], xs, outs)
        * align(w[1], ws, outs)
    )


def rounded_int8(array, own, outs):
    """(integers, scale) of an array with the letters `own`: one scale for each letter that the
    result has. XLA multiplies by 1/127.5, which has a last bit of its own; at a number of -127.5
    that decides between -127 and -128."""
    inputs = tuple(i for i, letter in enumerate(own) if letter not in outs)
    scale = np.max(np.abs(array), axis=inputs, keepdims=True) / np.float32(127)
    return np.rint(array / scale).astype(np.int64), scale


def align(scale, own, outs):
    """A scale with the letters `own` as one that multiplies an array with the letters `outs`."""
    kept = [letter for letter in outs if letter in own]
    lengths = dict(zip(own, scale.shape, strict=True))
    return np.einsum(f"{own}->{''.join(kept)}", scale).reshape(
        [lengths[k] if k in kept else 1 for k in outs]
    )


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float32) - expected) / np.linalg.norm(expected)


@partial(jax.jit, static_argnums=(0, 4))
def product_and_gradients(equation, x, w, cotangent, rule):
    out, backward = jax.vjp(lambda x, w: linear(equation, x, w, Runtime(quantization=rule)), x, w)
    return out, backward(cotangent.astype(out.dtype))


@pytest.mark.parametrize(("equation", "x_shape", "w_shape"), PRODUCTS)
def test_int8_is_the_product_of_integers_forward_and_backward(equation, x_shape, w_shape):
    """dx = q(g s_w) q(w), dw = q(g s_x) q(x)."""
    x, w = drawn(x_shape), drawn(w_shape, seed=1)
    xs, ws, outs = letters(equation, x)
    qx, qw = rounded_int8(x, xs, outs), rounded_int8(w, ws, outs)
    expected = quantized_product(xs, ws, outs, qx, qw)
    g = drawn(expected.shape, seed=2)
    out, grads = product_and_gradients(equation, x, w, g, "int8")
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    for result, requested, others, other in zip(grads, (xs, ws), (ws, xs), (qw, qx), strict=True):
        qg = rounded_int8(g * align(other[1], others, outs), outs, requested)
        expected = quantized_product(
            outs, others, requested, qg, (other[0], np.ones([1] * other[0].ndim, np.float32))
        )
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("rule", quantization.RULES)
@pytest.mark.parametrize(("equation", "x_shape", "w_shape"), [PRODUCTS[1], PRODUCTS[4]])
def test_products_and_gradients_are_near_those_of_floats(rule, equation, x_shape, w_shape):
    rng = np.random.default_rng(0)
    shape = np.einsum(equation, np.ones(x_shape), np.ones(w_shape)).shape
    x, w, g = (rng.normal(size=size).astype(np.float32) for size in (x_shape, w_shape, shape))
    (out, grads), (plain, floats) = (
        product_and_gradients(equation, x, w, g, name) for name in (rule, None)
    )
    assert 0 < relative(out, plain) < FORWARD[rule]
    for result, expected in zip(grads, floats, strict=True):
        assert 0 < relative(result, np.asarray(expected)) < BACKWARD[rule]


class OneProduct(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(jnp.asarray(w))

    def __call__(self, x):
        return jnp.einsum("bte,ehd->bthd", x, self.w[...])


@pytest.mark.parametrize("rule", quantization.RULES)
def test_the_rules_are_those_of_the_provider_of_qwix(rule):
    x, w = jnp.asarray(drawn((2, 3, 24))), drawn((24, 2, 5), seed=1)
    g = drawn((2, 3, 2, 5), seed=2)
    theirs = qwix.quantize_model(OneProduct(w), qwix.QtProvider([quantization.RULES[rule]]), x)
    with_gradients = nnx.jit(
        nnx.value_and_grad(lambda model, x: jnp.sum(model(x) * g), argnums=(0, 1))
    )
    _, (d_model, d_x) = with_gradients(theirs, x)
    out, result = product_and_gradients("bte,ehd->bthd", x, w, g, rule)
    np.testing.assert_allclose(out, nnx.jit(lambda model, x: model(x))(theirs, x), rtol=1e-6)
    np.testing.assert_allclose(result[0], d_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result[1], d_model["w"][...], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "choices"), [("int8", [0, 3, 3, 1, 0, 3, 3]), ("fp8_full", [4, 0])]
)
def test_ragged_and_blocked_products_of_experts_agree(rule, choices):
    """Groups without rows, and groups that fill no block; each expert has scales of its own."""
    x, w = (
        drawn((len(choices), 16)),
        drawn((5, 16, 6), seed=1) * np.array([1e-3, 1, 10, 1, 100], np.float32)[:, None, None],
    )
    choices, g, result = jnp.asarray(choices)[:, None], drawn((len(choices), 6), seed=2), []
    for block in (None, 2):

        def loss(x, w, block=block):
            routes = plan(choices, 5, block=block)
            rows = jnp.take(x, routes.token, axis=0, mode="fill", fill_value=0)
            out = product(rows, w, routes, Runtime(quantization=rule))[routes.row[:, 0]]
            return jnp.sum(out * g), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)
        result.append((out, *grads))
    np.testing.assert_allclose(result[0][0], result[1][0], rtol=1e-5)
    np.testing.assert_allclose(
        result[0][1], result[1][1], rtol=1e-4, atol=1e-4 * np.abs(result[0][1]).max()
    )
    dense = np.stack([x[i] @ w[e] for i, e in enumerate(np.asarray(choices)[:, 0])])
    d_rows = np.stack([w[e] @ g[i] for i, e in enumerate(np.asarray(choices)[:, 0])])
    d_weights = np.zeros_like(w)
    for i, e in enumerate(np.asarray(choices)[:, 0]):
        d_weights[e] += np.outer(x[i], g[i])
    for out, d_x, d_w in result:
        assert relative(out, dense) < FORWARD[rule]
        assert (
            relative(d_x, d_rows) < 2 * BACKWARD[rule]
            and relative(d_w, d_weights) < 2 * BACKWARD[rule]
        )
        empty = sorted(set(range(5)) - set(np.asarray(choices)[:, 0].tolist()))
        np.testing.assert_array_equal(np.asarray(d_w)[empty], 0)


def test_rows_of_zeros_give_zeros_and_results_keep_the_dtype_of_the_activations():
    x = jnp.zeros((1, 2, 24), jnp.bfloat16).at[0, 1].set(1.5)
    w = jnp.asarray(drawn((24, 2, 5)))
    for rule in quantization.RULES:
        out, (d_x, d_w) = product_and_gradients("bte,ehd->bhtd", x, w, jnp.ones((1, 2, 2, 5)), rule)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(out[:, :, 0], np.float32), 0)
        assert (d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.float32)
        assert np.isfinite(np.asarray(d_x, np.float32)).all() and np.isfinite(d_w).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_rule_a_product_is_the_plain_one(dtype):
    x, w, sizes = jnp.ones((2, 3, 8), dtype), jnp.ones((8, 4)), jnp.asarray([1, 2])
    heads = jnp.ones((8, 2, 5))

    def same(ours, plain, *operands):
        assert str(jax.make_jaxpr(ours)(*operands)) == str(jax.make_jaxpr(plain)(*operands))

    same(
        lambda x, w: linear("...e,ei->...i", x, w, Runtime()),
        lambda x, w: x @ w.astype(dtype),
        x,
        w,
    )
    plain = lambda x, w: jnp.einsum("bte,ehd->bhtd", x, w.astype(dtype))  # noqa: E731
    same(lambda x, w: linear("bte,ehd->bhtd", x, w, Runtime()), plain, x, heads)
    experts = jnp.ones((2, 8, 4))
    plain = lambda x, w, n: jax.lax.ragged_dot(x, w.astype(dtype), n)  # noqa: E731
    same(lambda x, w, n: ragged_linear(x, w, n, Runtime()), plain, x[0], experts, sizes)


def test_quantised_operands_can_be_kept_by_a_remat_policy():
    x, w = jnp.asarray(drawn((2, 3, 24))), jnp.asarray(drawn((24, 24), seed=1))

    @partial(jax.jit, static_argnums=2)
    def gradients(x, w, policy):
        """Of two layers; and the types of the matrices that the backward pass is given."""

        def layers(x, w):
            for _ in range(2):
                x = jnp.tanh(linear("bte,ei->bti", x, w, Runtime(quantization="int8")))
            return x.sum()

        _, backward = jax.vjp(
            layers if policy is None else jax.checkpoint(layers, policy=policy), x, w
        )
        kept.append([str(a.dtype) for a in jax.tree.leaves(backward) if a.size > 1])
        return backward(1.0)

    kept = []
    plain = gradients(x, w, None)
    for policy in (
        checkpoint_policies.nothing_saveable,
        checkpoint_policies.save_only_these_names("quantization"),
    ):
        for result, expected in zip(gradients(x, w, policy), plain, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert [types.count("int8") for types in kept[1:]] == [0, 4]


@pytest.mark.parametrize("rule", [None, "int8"])
def test_stored_weights_are_multiplied_equally_in_every_form(rule):
    """A stored weight of experts, ragged and in blocks, gives what the numbers that it stands for
    give."""
    x, w, choices = drawn((7, 16)), drawn((5, 16, 6), seed=1), jnp.asarray([0, 3, 3, 1, 0, 3, 3])
    stored = quantization.quantize(jnp.asarray(w), jnp.int8, (1,))
    q, scale = rounded_int8(x, "me", "m")
    rows = x if rule is None else q * scale
    expected = np.stack(
        [row @ np.asarray(qwix.dequantize(stored))[e] for row, e in zip(rows, choices, strict=True)]
    )
    for block in (None, 2):
        routes = plan(choices[:, None], 5, block=block)
        given = jnp.take(jnp.asarray(x), routes.token, axis=0, mode="fill", fill_value=0)
        out = jax.jit(
            lambda a, routes=routes: product(a, stored, routes, Runtime(quantization=rule))
        )(given)
        np.testing.assert_allclose(out[routes.row[:, 0]], expected, rtol=1e-4, atol=1e-5)
