"""The delta rule with a decay for each key channel (Kimi Delta Attention, arXiv 2510.26692): token
by token, in chunks, and in chunks over trees.

S_t = diag(e^g_t) S_(t-1) + k_t u_t^T, u_t = beta_t (v_t - (diag(e^g_t) S_(t-1))^T k_t); the output
is S_t^T q_t. The functions are those of policy/recurrent/delta_rule.py for G = 1, but g is [B, K,
T, D].

Within a chunk, token i reads what token j wrote through sum_d k_id k_jd e^(g_(j+1)d + ... + g_id).
One factor e^-(g_1 + ... + g_j) for all of a chunk would overflow, so a chunk consists of blocks.
Across blocks the exponent is cut where the later block begins: both factors are at most 1. Inside a
block, the decays of all pairs are computed.

B rows, T tokens, K key heads, G = 1, D and V dimensions of keys and values, N chunks of C tokens, I
tokens of a block, X any number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.cache.paths import Tree
from policy.recurrent.delta_rule import Paths, in_chunks, joined, token_by_token, unit_lower_inverse

CHUNK = 64
BLOCK = 16


def single(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence for one token: (out [B, K, 1, 1, V], state)."""
    kept = jnp.exp(g).swapaxes(2, 3)[:, :, None] * state_BKGDV
    seen = jnp.einsum("bkxd,bkgdv->bkgxv", jnp.concatenate([k, q], axis=2), kept)
    written = beta[..., None] * (v - seen[..., :1, :])
    match = jnp.sum(k * q, axis=-1)[:, :, None, :, None]
    return seen[..., 1:, :] + match * written, kept + k.swapaxes(2, 3)[:, :, None] * written


def stepwise(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence token by token: (out [B, K, 1, T, V], states after each token [B, T,
    K, 1, D, V])."""
    return token_by_token(single, (q, k, v, beta, g), (2, 2, 3, 3, 2), state_BKGDV)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    documents_BT: jax.Array,
    state_BKGDV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence over T tokens, C at a time: (out [B, K, 1, T, V], state after the
    last token).

    The written values of a chunk solve a unit lower triangular system, as in
    policy/recurrent/delta_rule.py. The backward pass computes a chunk again, so that the decays of
    one chunk exist at a time.
    """
    T = v.shape[3]
    C = min(CHUNK, T + -T % BLOCK)
    chunks = [in_chunks(a, 2, C) for a in (q, k, v[:, :, 0], beta[:, :, 0], g)]
    documents_NBC = in_chunks(documents_BT, 1, C, mode="edge")
    first = jnp.zeros_like(documents_NBC[:1, :, -1:])
    carried = documents_NBC == jnp.concatenate([first, documents_NBC[:-1, :, -1:]])
    causal = jnp.tril(jnp.ones((C, C), bool))

    def chunk(state, xs):
        q, k, v, beta, g, documents, carried = xs
        same = documents[:, :, None] == documents[:, None, :]
        last = documents == documents[:, -1:]
        entering = jnp.where(carried[:, None, :, None], jnp.exp(jnp.cumsum(g, axis=2)), 0.0)
        remaining = jnp.where(last[:, None, :, None], jnp.exp(_sum_after(g)), 0.0)
        keys, queries = jnp.where((same & causal)[:, None], _pairs(jnp.stack([k, q]), k, g), 0.0)
        solution = unit_lower_inverse(beta[..., None] * keys) * beta[..., None, :]
        u = solution @ (v - (k * entering) @ state)
        out = (q * entering) @ state + queries @ u
        after = entering[:, :, -1, :, None] * state + jnp.einsum(
            "bkcd,bkcv->bkdv", k * remaining, u
        )
        return after, out

    state, out = jax.lax.scan(
        jax.checkpoint(chunk), state_BKGDV[:, :, 0], (*chunks, documents_NBC, carried)
    )
    return joined(out[:, :, :, None], T), state[:, :, None]


def chunked_trees(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, tree: Tree
) -> jax.Array:
    """Computes the recurrence along the paths of trees of a root and leaves, a block at a time: out
    [B, K, 1, T, V].

    As in policy/recurrent/delta_rule.py, the path of a token enters a block with the running or
    with the kept state.
    """
    T = v.shape[3]
    I = BLOCK
    chunks = [in_chunks(a, 2, I) for a in (q, k, v[:, :, 0], beta[:, :, 0], g)]
    later = jnp.tril(jnp.ones((I, I), bool), -1)[..., None]

    def block(states, xs):
        (running, kept), (q, k, v, beta, g, paths) = states, xs
        along = paths.along.astype(jnp.float32)
        logs = jnp.einsum("bil,bkljd->bkijd", along, jnp.where(later, g[:, :, :, None], 0.0))
        decay = jnp.exp(jnp.where(paths.along[:, None, ..., None], logs, -jnp.inf))
        total = jnp.exp(jnp.einsum("bil,bkld->bkid", along, g))
        entering = [
            jnp.where(here[:, None, :, None], total, 0.0) for here in (paths.running, paths.kept)
        ]
        keys, queries = jnp.einsum("xbkid,bkjd,bkijd->xbkij", jnp.stack([k, q]), k, decay)
        solution = unit_lower_inverse(beta[..., None] * keys) * beta[..., None, :]
        u = solution @ (v - (k * entering[0]) @ running - (k * entering[1]) @ kept)
        out = (q * entering[0]) @ running + (q * entering[1]) @ kept + queries @ u
        # Up to the last token, for the next running state, and to the end of the last root, for the
        # next kept one.
        ends = paths.ends
        remaining = decay[:, :, -1], jnp.einsum("bi,bkijd->bkjd", ends, decay)
        written = [jnp.einsum("bkcd,bkcv->bkdv", k * each, u) for each in remaining]
        passed = jnp.einsum("bi,bkid->bkd", ends, entering[0])[..., None] * running
        no_end = 1.0 - jnp.sum(ends, axis=-1)[:, None, None, None]
        after = (
            entering[0][:, :, -1, :, None] * running
            + entering[1][:, :, -1, :, None] * kept
            + written[0]
        )
        return (after, passed + no_end * kept + written[1]), out

    B, K, _, D = q.shape
    empty = jnp.zeros((B, K, D, v.shape[-1]), jnp.float32)
    _, out = jax.lax.scan(jax.checkpoint(block), (empty, empty), (*chunks, Paths.of(tree, I)))
    return joined(out[:, :, :, None], T)


def _pairs(x_XBKCD: jax.Array, k_BKCD: jax.Array, g_BKCD: jax.Array) -> jax.Array:
    """Returns sum_d x_id k_jd e^(g_(j+1)d + ... + g_id) for j <= i, else 0: [X, B, K, C, C].

    Exponents are sums, not differences of one cumulative sum, which would lose digits after a
    strong decay.
    """
    C = k_BKCD.shape[2]
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[..., None]
    later = jnp.tril(jnp.ones((BLOCK, BLOCK), bool), -1)[..., None]
    rows = []
    for start in range(0, C, BLOCK):
        own = slice(start, start + BLOCK)
        x = x_XBKCD[..., own, :]
        k = k_BKCD[:, :, own]
        g = g_BKCD[:, :, own]
        logs = jnp.cumsum(jnp.where(later, g[:, :, :, None], 0.0), axis=2)
        inside = jnp.einsum(
            "xbkid,bkjd,bkijd->xbkij", x, k, jnp.exp(jnp.where(causal, logs, -jnp.inf))
        )
        since = x * jnp.exp(jnp.cumsum(g, axis=2))
        until = k_BKCD[:, :, :start] * jnp.exp(_sum_after(g_BKCD[:, :, :start]))
        across = jnp.einsum("xbkid,bkjd->xbkij", since, until)
        row = jnp.concatenate([across, inside], axis=-1)
        rows.append(jnp.pad(row, [(0, 0)] * 4 + [(0, C - start - BLOCK)]))
    return jnp.concatenate(rows, axis=-2)


def _sum_after(g_BKTD: jax.Array) -> jax.Array:
    """Returns the sum of g over the tokens after each token."""
    after = jnp.cumsum(g_BKTD[:, :, :0:-1], axis=2)[:, :, ::-1]
    return jnp.concatenate([after, jnp.zeros_like(g_BKTD[:, :, :1])], axis=2)[
        :, :, : g_BKTD.shape[2]
    ]
