"""The batch-split schedule on one device, and where it does not apply. On meshes:
tests/contracts/test_experts_on_a_mesh.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from oracles import configuration

from policy import families
from policy.config import Runtime
from policy.layers import batch_split
from policy.modes import make_step


def value_and_gradient(model, data, **changes):
    """(log-probabilities, counts of choices, gradients) of a decoder of one layer of experts."""
    graph = model.graph.with_runtime(**changes)

    @jax.jit
    def run(params):
        def loss(params):
            logp, entropy, aux = graph.logprobs(
                params, data.tokens, make_step(data.tokens, segments=data.segments), 0.9
            )
            (routing,) = aux.by_layer("routing").values()
            return jnp.sum(logp * data.sampler_logp + entropy) + routing.balance.sum(), (
                logp,
                routing.counts,
            )

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, (logp, counts)), gradient = run(model.params)
    return logp, counts, gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), pytest.param("bfloat16", 0.02, marks=pytest.mark.slow)],
)
def test_both_halves_together_are_the_plain_layer(dtype, tolerance):
    """A gradient of a weight is the sum of what either half gives, each rounded to the dtype
    (bfloat16: 8 bits)."""
    model, data = learners.experts(), learners.batch(rows=6)
    logp, counts, gradient = value_and_gradient(model, data, dtype=dtype)
    split_logp, split_counts, split_gradient = value_and_gradient(
        model, data, dtype=dtype, batch_split=True
    )
    np.testing.assert_allclose(split_logp, logp, atol=tolerance)
    np.testing.assert_array_equal(split_counts, counts)
    largest = max(float(jnp.abs(g).max()) for g in gradient.values())
    for path, expected in gradient.items():
        scale = max(1e-3 * largest, float(jnp.abs(expected).max()))
        np.testing.assert_allclose(
            split_gradient[path], expected, atol=tolerance * scale, rtol=0, err_msg=path
        )


@pytest.mark.slow
def test_what_is_recorded_of_a_layer_is_that_of_all_rows():
    model, data = learners.experts(), learners.batch(rows=6)

    def recorded(**changes):
        graph = model.graph.with_runtime(record=("hidden", "mixed", "activations"), **changes)
        _, _, aux = graph.logprobs(
            model.params, data.tokens, make_step(data.tokens, segments=data.segments), 0.9
        )
        return [aux.by_layer(name) for name in ("hidden", "mixed", "activations")]

    plain, split = recorded(), recorded(batch_split=True)
    assert all(result for result in plain)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


def test_rows_alternate_between_the_halves():
    runtime = replace(Runtime(), layout=None)
    x = jnp.arange(12).reshape(6, 2, 1)
    first, second = batch_split.split(x, runtime)
    np.testing.assert_array_equal(first[:, 0, 0], [0, 4, 8])
    np.testing.assert_array_equal(second[:, 0, 0], [2, 6, 10])
    np.testing.assert_array_equal(batch_split.merge((first, second)), x)


def test_a_schedule_that_cannot_be_had_is_refused():
    llama = families.read(configuration("Llama"))
    with pytest.raises(ValueError, match="this decoder has none"):
        batch_split.check(llama, Runtime(batch_split=True))
    batch_split.check(llama, Runtime())
