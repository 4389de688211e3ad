"""Norms whose reductions can be computed at low precision."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration

from policy import families
from policy.config import LayerNorm
from policy.ops.norms import norm


def layer(reductions):
    with nnx.use_eager_sharding(False):
        made = norm(64, LayerNorm(eps=1e-5, reductions=reductions), nnx.Rngs(0))
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
        assert families.read(configuration("GPT2", **keys)).norm.reductions == expected
