"""The recurrence of Mamba-2 against itself in float64, one token after the other.

B rows, K groups, G heads of a group, T tokens, D and V dimensions of keys and values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.recurrent import linear_rule as rule

B, K, G, D, V = 2, 2, 3, 12, 10


def problem(T, strength):
    """(q, k [B, K, T, D], v [B, K, G, T, V], beta, g [B, K, G, T]); decays reach e^-(4
    strength)."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, K, T, D)) for _ in range(2))
    v = rng.normal(size=(B, K, G, T, V))
    beta = rng.uniform(size=(B, K, G, T))
    g = -strength * np.logaddexp(0, rng.normal(size=(B, K, G, T)))
    return tuple(a.astype(np.float32) for a in (q, k, v, beta, g))


def recurrence(arrays, documents, before):
    """(out [B, K, G, T, V], state [B, K, G, D, V]) in float64; the first document begins with
    `before`."""
    q, k, v, beta, g = (a.astype(np.float64) for a in arrays)
    out, states = np.zeros(v.shape), before.astype(np.float64)
    for row in range(B):
        state = states[row]
        for t in range(v.shape[3]):
            if t and documents[row, t] != documents[row, t - 1]:
                state = np.zeros_like(state)
            state = np.exp(g[row, :, :, t])[..., None, None] * state
            written = beta[row, :, :, t, None] * v[row, :, :, t]
            state = state + np.einsum("kd,kgv->kgdv", k[row, :, t], written)
            out[row, :, :, t] = np.einsum("kgdv,kd->kgv", state, q[row, :, t])
        states[row] = state
    return out, states


def close(result, expected):
    result = np.asarray(result)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


# Documents that begin inside chunks and at their ends; decays that end a memory at once.
@pytest.mark.parametrize("strength", [0.02, 1.0, 60.0])
@pytest.mark.parametrize(
    "lengths", [(5,), (64,), (5, 70, 1, 74)], ids=lambda lengths: "_".join(map(str, lengths))
)
def test_chunks_give_what_the_recurrence_gives(lengths, strength):
    documents = np.repeat(np.arange(len(lengths)), lengths)[None].repeat(B, axis=0)
    documents[1] = 0  # a row of one document
    arrays = problem(documents.shape[1], strength)
    before = np.random.default_rng(1).normal(size=(B, K, G, D, V)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        out, state = jax.jit(rule.chunked)(*arrays, jnp.asarray(documents, jnp.int32), before)
    expected, after = recurrence(arrays, documents, before)
    close(out, expected)
    close(state, after)


@pytest.mark.parametrize("strength", [0.02, 60.0])
def test_single_tokens_give_what_the_recurrence_gives(strength):
    arrays = problem(9, strength)
    before = np.random.default_rng(1).normal(size=(B, K, G, D, V)).astype(np.float32)
    expected, after = recurrence(arrays, np.zeros((B, 9), int), before)
    with jax.default_matmul_precision("highest"):
        out, states = jax.jit(rule.stepwise)(*arrays, before)
    close(out, expected)
    close(states[:, -1], after)
