"""From hidden states to logits, and to log-probabilities and entropies without ever holding logits of all tokens.

M tokens (rows and positions flattened), E hidden, V vocabulary. All logits are float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Logits held at once: 2^24 float32 are 64 MiB.
CHUNK_LOGITS = 1 << 24


def logits(hidden_ME: jax.Array, weight_VE: jax.Array, softcap: float | None = None) -> jax.Array:
    """hidden @ weight^T as float32, bounded by softcap * tanh(z / softcap) if there is one; any leading dimensions."""
    z = jnp.einsum("...e,ve->...v", hidden_ME, weight_VE.astype(hidden_ME.dtype), preferred_element_type=jnp.float32)
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


def logprobs(
    hidden_ME: jax.Array, weight_VE: jax.Array, targets_M: jax.Array, temperature, softcap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """(logp, entropy), float32[M]: log softmax(logits / temperature) at `targets`, and the entropy of that distribution.

    Works through the tokens in chunks of at most CHUNK_LOGITS logits; the backward pass computes the logits again, so nothing
    of size [M, V] is kept. Differentiable in hidden and weight, through both results.
    """
    M = hidden_ME.shape[0]
    chunk = max(1, min(M, CHUNK_LOGITS // weight_VE.shape[0]))
    pad = -M % chunk
    hidden = jnp.pad(hidden_ME, ((0, pad), (0, 0))).reshape(-1, chunk, hidden_ME.shape[1])
    targets = jnp.pad(targets_M, (0, pad)).reshape(-1, chunk)
    logp, entropy = _chunked(hidden, weight_VE, targets, jnp.asarray(temperature, jnp.float32), softcap)
    return logp.reshape(-1)[:M], entropy.reshape(-1)[:M]


def likeliest(hidden_ME: jax.Array, weight_VE: jax.Array, softcap: float | None = None) -> jax.Array:
    """int32[M]: the token of the largest logit, in chunks as in `logprobs`. No gradient."""
    M, E = hidden_ME.shape
    chunk = max(1, min(M, CHUNK_LOGITS // weight_VE.shape[0]))
    hidden, weight = jax.lax.stop_gradient((jnp.pad(hidden_ME, ((0, -M % chunk), (0, 0))).reshape(-1, chunk, E), weight_VE))
    return jax.lax.map(lambda h: jnp.argmax(logits(h, weight, softcap), axis=-1), hidden).reshape(-1)[:M].astype(jnp.int32)


def _log_softmax(z, temperature):
    z = z / temperature
    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden, weight, targets, temperature, softcap):
    def one(xs):
        log_p = _log_softmax(logits(xs[0], weight, softcap), temperature)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.take_along_axis(log_p, xs[1][:, None], axis=-1)[:, 0], entropy

    return jax.lax.map(one, (hidden, targets))


def _forward(hidden, weight, targets, temperature, softcap):
    logp, entropy = _chunked(hidden, weight, targets, temperature, softcap)
    return (logp, entropy), (hidden, weight, targets, temperature, entropy)


def _backward(softcap, saved, cotangents):
    """d logp / dz = onehot - p and d H / dz = -p (log p + H), both divided by the temperature; a soft cap c adds the factor
    1 - (z / c)^2 of its capped logits z."""
    hidden, weight, targets, temperature, entropy = saved
    w = weight.astype(hidden.dtype)

    def one(g_weight, xs):
        h, t, ent, g_logp, g_ent = xs
        z = logits(h, weight, softcap)
        log_p = _log_softmax(z, temperature)
        p = jnp.exp(log_p)
        g_z = -p * (g_logp[:, None] + g_ent[:, None] * (log_p + ent[:, None]))
        g_z = g_z.at[jnp.arange(t.shape[0]), t].add(g_logp, unique_indices=True)
        if softcap is not None:
            g_z = g_z * (1.0 - jnp.square(z / softcap))
        g_z = (g_z / temperature).astype(h.dtype)
        g_weight = g_weight + jnp.einsum("mv,me->ve", g_z, h, preferred_element_type=jnp.float32)
        return g_weight, g_z @ w

    start = jnp.zeros(weight.shape, jnp.float32)
    g_weight, g_hidden = jax.lax.scan(one, start, (hidden, targets, entropy, *cotangents))
    return g_hidden, g_weight.astype(weight.dtype), None, None


_chunked.defvjp(_forward, _backward)
