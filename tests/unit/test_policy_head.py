"""Chunked log-probabilities and entropies equal what plain automatic differentiation gives with all logits at hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import head

M, E, V = 13, 6, 11


def plain(hidden, weight, targets, temperature):
    z = jnp.einsum("me,ve->mv", hidden, weight) / temperature
    log_p = jax.nn.log_softmax(z, axis=-1)
    return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def inputs():
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=shape).astype(np.float32) for shape in ((M, E), (V, E), (M,), (M,)))
    return *(jnp.asarray(a) for a in arrays), jnp.asarray(rng.integers(0, V, M))


# One token a chunk, chunks with a remainder, chunks that divide, all at once.
@pytest.mark.parametrize("chunk", [1, 4, 13, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk, temperature, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk * V)
    hidden, weight, a, b, targets = inputs()

    def loss(function):
        def of(hidden, weight):
            logp, entropy = function(hidden, weight, targets, temperature)
            return jnp.sum(a * logp + b * entropy), (logp, entropy)

        return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(hidden, weight)

    with jax.default_matmul_precision("highest"):
        (_, found), found_gradients = loss(head.logprobs)
        (_, expected), expected_gradients = loss(plain)
    for x, y in zip((*found, *found_gradients), (*expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-6, rtol=1e-5)


def test_a_tied_weight_gets_the_gradient_of_both_uses(monkeypatch):
    """The table is the embedding of the hidden states as well as the head."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 4 * V)
    _, table, a, b, targets = inputs()
    tokens = jnp.arange(M) % V

    def loss(function, table):
        logp, entropy = function(jnp.tanh(table[tokens]), table, targets, 1.0)
        return jnp.sum(a * logp + b * entropy)

    found = jax.grad(lambda t: loss(head.logprobs, t))(table)
    np.testing.assert_allclose(found, jax.grad(lambda t: loss(plain, t))(table), atol=5e-6, rtol=1e-5)


def test_no_array_of_all_logits_is_made(monkeypatch):
    """Not even in the backward pass: no intermediate of the program has M x V elements."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 64 * 32)
    hidden, weight, targets = jnp.ones((1024, 8)), jnp.ones((32, 8)), jnp.zeros(1024, int)
    program = jax.jit(jax.grad(lambda h, w: sum(map(jnp.sum, head.logprobs(h, w, targets, 1.0))), argnums=(0, 1)))
    text = program.lower(hidden, weight).as_text()
    assert "64x32xf32" in text and "1024x32xf32" not in text and "16x64x32xf32" not in text


def test_far_apart_logits_give_no_nan():
    hidden, weight = jnp.asarray([[1e4], [-1e4]]), jnp.asarray([[1.0], [-1.0], [0.0]])
    logp, entropy = head.logprobs(hidden, weight, jnp.asarray([0, 0]), 1.0)
    np.testing.assert_allclose(logp, [0.0, -2e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)
    gradient = jax.grad(lambda h: sum(map(jnp.sum, head.logprobs(h, weight, jnp.asarray([0, 0]), 1.0))))(hidden)
    assert np.isfinite(gradient).all()


def test_logits_of_bfloat16_states_are_float32():
    hidden, weight = jnp.ones((2, 3, E), jnp.bfloat16), jnp.ones((V, E), jnp.float32)
    assert head.logits(hidden, weight).dtype == jnp.float32 and head.logits(hidden, weight).shape == (2, 3, V)
