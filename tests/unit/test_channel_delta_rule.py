"""The delta rule with a decay for each key channel, against the recurrence in float64, one token
after the other.

B rows, K heads, T tokens, D and V dimensions of keys and values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.recurrent import channel_delta_rule as rule

B, K, D, V = 2, 3, 12, 10


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def problem(T, strength, seed=0):
    """(q, k [B, K, T, D], v [B, K, 1, T, V], beta [B, K, 1, T], g [B, K, T, D]); decays reach e^-(4
    strength)."""
    rng = np.random.default_rng(seed)
    q, k = (unit(rng.normal(size=(B, K, T, D))) for _ in range(2))
    v = rng.normal(size=(B, K, 1, T, V))
    beta = rng.uniform(size=(B, K, 1, T))
    g = -strength * np.logaddexp(0, rng.normal(size=(B, K, T, D)))
    return tuple(a.astype(np.float32) for a in (q / np.sqrt(D), k, v, beta, g))


def recurrence(q, k, v, beta, g, state, xp=np):
    """(out [K, T, V], state [K, D, V]) of one row and document."""
    out = []
    for t in range(q.shape[1]):
        state = xp.exp(g[:, t])[..., None] * state
        u = beta[:, 0, t, None] * (v[:, 0, t] - xp.einsum("kdv,kd->kv", state, k[:, t]))
        state = state + k[:, t, :, None] * u[:, None]
        out.append(xp.einsum("kdv,kd->kv", state, q[:, t]))
    return xp.stack(out, axis=1), state


def by_document(arrays, documents, state):
    """(out [B, K, T, V], state [B, K, D, V]), float64; the first document begins with `state`."""
    outs, states = [], []
    for row in range(B):
        after = state[row].astype(np.float64)
        out = np.zeros((K, documents.shape[1], V))
        for number in dict.fromkeys(documents[row].tolist()):
            here = documents[row] == number
            before = after if number == documents[row, 0] else np.zeros_like(after)
            q, k, v, beta, g = (a[row].astype(np.float64) for a in arrays)
            part = q[:, here], k[:, here], v[:, :, here], beta[:, :, here], g[:, here]
            out[:, here], after = recurrence(*part, before)
        outs.append(out)
        states.append(after)
    return np.stack(outs), np.stack(states)


def close(result, expected, tolerance):
    result = np.asarray(result)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def chunked(arrays, documents, state):
    with jax.default_matmul_precision("highest"):
        return jax.jit(rule.chunked)(*arrays, documents, state)


# Documents that begin inside blocks, at their ends and at the ends of chunks; decays that end a
# memory at once.
@pytest.mark.parametrize("strength", [0.02, 1.0, 60.0])
@pytest.mark.parametrize(
    "lengths",
    [(5,), (16,), (17, 3), (64,), (5, 70, 1, 74)],
    ids=lambda lengths: "_".join(map(str, lengths)),
)
def test_chunks_give_what_the_recurrence_gives(lengths, strength):
    documents = np.repeat(np.arange(len(lengths)), lengths)[None].repeat(B, axis=0)
    documents[1] = 0  # a row of one document
    arrays = problem(documents.shape[1], strength)
    before = np.random.default_rng(1).normal(size=(B, K, 1, D, V)).astype(np.float32)
    numbers = jnp.asarray(documents, jnp.int32)
    out, state = chunked(arrays, numbers, before)
    expected, after = by_document(arrays, documents, before[:, :, 0])
    close(out[:, :, 0], expected, 3e-6)
    close(state[:, :, 0], after, 3e-6)


@pytest.mark.parametrize("strength", [0.02, 60.0])
def test_single_tokens_give_what_the_recurrence_gives(strength):
    arrays = problem(9, strength)
    before = np.random.default_rng(1).normal(size=(B, K, 1, D, V)).astype(np.float32)
    expected, after = by_document(arrays, np.zeros((B, 9), int), before[:, :, 0])
    with jax.default_matmul_precision("highest"):
        out, states = jax.jit(rule.stepwise)(*arrays, before)
    close(out[:, :, 0], expected, 3e-6)
    close(states[:, -1, :, 0], after, 3e-6)


@pytest.mark.parametrize("strength", [1.0, 60.0])
def test_gradients_are_those_of_the_recurrence(strength):
    T = 83
    documents = np.repeat([1, 2], [30, 53])[None].repeat(B, axis=0)
    arrays = problem(T, strength)
    weights = np.random.default_rng(2).normal(size=(B, K, T, V)).astype(np.float32)
    empty = np.zeros((B, K, 1, D, V), np.float32)

    def ours(*arrays):
        out, _ = rule.chunked(*arrays, jnp.asarray(documents, jnp.int32), empty)
        return jnp.sum(out[:, :, 0] * weights)

    def plain(*arrays):
        """Token by token; a document begins with an empty state."""

        def token(state, xs):
            q, k, v, beta, g, begins = xs
            state = jnp.where(begins, 0.0, 1.0) * jnp.exp(g)[..., None] * state
            u = beta[..., None] * (v - jnp.einsum("bkdv,bkd->bkv", state, k))
            state = state + k[..., None] * u[:, :, None]
            return state, jnp.einsum("bkdv,bkd->bkv", state, q)

        q, k, v, beta, g = arrays
        xs = [jnp.moveaxis(a, 2, 0) for a in (q, k, v[:, :, 0], beta[:, :, 0], g)]
        begins = jnp.arange(T) == 30
        _, out = jax.lax.scan(token, jnp.zeros((B, K, D, V)), (*xs, begins))
        return jnp.sum(jnp.moveaxis(out, 0, 2) * weights)

    with jax.default_matmul_precision("highest"):
        result, expected = (
            jax.jit(jax.grad(f, argnums=(0, 1, 2, 3, 4)))(*arrays) for f in (ours, plain)
        )
    for one, other in zip(result, expected, strict=True):
        close(one, np.asarray(other), 2e-5)
