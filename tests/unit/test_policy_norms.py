"""Norms whose reductions can be computed at low precision, and the gradients of norms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration

from policy import families
from policy.config import LayerNorm, Norm
from policy.ops.norms import MeanNorm, norm, stream_norm


def layer(reductions):
    with nnx.use_eager_sharding(False):
        made = norm(64, LayerNorm(eps=1e-5, reductions=reductions), nnx.Rngs(0))
    assert isinstance(made, MeanNorm)
    rng = np.random.default_rng(1)
    made.weight[...], made.bias[...] = (
        jnp.asarray(rng.normal(1, 0.3, 64), jnp.float32) for _ in range(2)
    )
    return made


def exact(made, x):
    x = np.asarray(x, np.float64)
    x = x - x.mean(-1, keepdims=True)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return normed * np.asarray(made.weight[...], np.float64) + np.asarray(
        made.bias[...], np.float64
    )


@pytest.mark.parametrize("reductions", ["float32", "activation"])
def test_layer_norm_in_float32_is_that_of_the_book(reductions):
    made, x = layer(reductions), np.random.default_rng(0).normal(3, 2, (20, 64)).astype(np.float32)
    np.testing.assert_allclose(made(jnp.asarray(x)), exact(made, x), atol=2e-6, rtol=0)


def test_reductions_in_bfloat16_lose_what_those_in_float32_keep():
    x = jnp.asarray(np.random.default_rng(0).normal(30, 2, (200, 64)), jnp.bfloat16)
    errors = {}
    for reductions in ("float32", "activation"):
        made = layer(reductions)
        out = made(x)
        assert out.dtype == jnp.bfloat16
        errors[reductions] = np.abs(np.asarray(out, np.float64) - exact(made, x)).mean()
    assert errors["float32"] < 0.01 and errors["activation"] > 2 * errors["float32"]


def test_the_configuration_of_gpt3_says_how_its_norms_reduce():
    for value, expected in ((True, "float32"), (False, "activation"), (None, "float32")):
        keys = {} if value is None else {"reductions_in_fp32": value}
        read = families.read(configuration("GPT2", **keys)).norm
        assert isinstance(read, LayerNorm) and read.reductions == expected


def slopes(function, x):
    """The gradient of a function of float64 by central differences."""
    steps = 1e-5 * np.eye(x.size).reshape(x.size, *x.shape)
    differences = [function(x + step) - function(x - step) for step in steps]
    return np.reshape(differences, x.shape) / 2e-5


def over_rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


RMS = {
    "after_cast": lambda x, w: over_rms(x) * w,
    "zero_centred": lambda x, w: over_rms(x) * (1 + w),
    "none": lambda x, w: over_rms(x),
    "layer norm": lambda x, w: over_rms(x - x.mean(-1, keepdims=True)) * w,
    "streams": lambda x, w: over_rms(x) * w,
}


def streams(x, w):
    return stream_norm(x, w, Norm(eps=1e-5))


def module(kind):
    """Returns a norm as a function of its input and its weight."""
    config = LayerNorm(eps=1e-5) if kind == "layer norm" else Norm(eps=1e-5, scale=kind)
    with nnx.use_eager_sharding(False):
        graph, made = nnx.split(norm(16, config, nnx.Rngs(0)))
    state: Any = made

    def run(x, w):
        weights = state if kind == "none" else {**state, "weight": state["weight"].replace(w)}
        merged: Any = nnx.merge(graph, nnx.State(weights))
        return merged(x)

    return run


@pytest.mark.parametrize("kind", RMS)
def test_gradients_of_norms_are_those_of_float64(kind):
    """Also far from zero, and of a row of zeros."""
    rng = np.random.default_rng(2)
    x = rng.normal(1, 3, (2, 3, 16))
    x[0, 0] = 0
    w = rng.normal(1, 0.3, (3, 16) if kind == "streams" else 16)
    given = rng.normal(size=x.shape)
    run = streams if kind == "streams" else module(kind)

    def total(x, w):
        return jnp.sum(run(x, w) * given.astype(np.float32))

    ours = jax.grad(total, (0, 1))(*(jnp.asarray(a, jnp.float32) for a in (x, w)))
    exact = (
        slopes(lambda x: np.sum(RMS[kind](x, w) * given), x),
        slopes(lambda w: np.sum(RMS[kind](x, w) * given), w),
    )
    for got, expected in zip(ours, exact, strict=True):
        scale = 1 + np.abs(expected).max()
        np.testing.assert_allclose(got, expected, atol=1e-5 * scale)
