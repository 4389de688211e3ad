"""The recurrence of Mamba-2 (arXiv 2405.21060): token by token, in chunks, and in chunks over
trees.

S_t = e^g_t S_(t-1) + k_t (beta_t v_t)^T; the output is S_t^T q_t. It is the delta rule of
policy/recurrent/delta_rule.py without the value that is taken away, so nothing is solved. The
functions have the arguments and results of that module.

B rows, T tokens, K key heads, G value heads of a key head, D and V dimensions of keys and values, N
chunks of C tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.cache.paths import Tree
from policy.recurrent.delta_rule import (
    CHUNK,
    Paths,
    decays,
    decays_along,
    in_chunks,
    joined,
    products,
    token_by_token,
)


def single(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence for one token: (out [B, K, G, 1, V], state)."""
    written = k.swapaxes(2, 3)[:, :, None] * (beta[..., None] * v)
    state = jnp.exp(g)[..., None] * state_BKGDV + written
    return jnp.einsum("bkxd,bkgdv->bkgxv", q, state), state


def stepwise(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence token by token: (out [B, K, G, T, V], states after each token [B, T,
    K, G, D, V])."""
    return token_by_token(single, (q, k, v, beta, g), (2, 2, 3, 3, 3), state_BKGDV)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    documents_BT: jax.Array,
    state_BKGDV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence over T tokens, C at a time: (out [B, K, G, T, V], state after the
    last token)."""
    T = v.shape[3]
    C = min(CHUNK, T)
    q, k, u, g = (
        in_chunks(a, axis, C) for a, axis in ((q, 2), (k, 2), (beta[..., None] * v, 3), (g, 3))
    )
    decay, entering = decays(g, in_chunks(documents_BT, 1, C, mode="edge"))
    written = jnp.einsum("nbkcd,nbkgcv->nbkgdv", k, decay[..., -1, :, None] * u)

    def chunk(state, xs):
        written, kept = xs
        return kept[..., None] * state + written, state

    state, states = jax.lax.scan(chunk, state_BKGDV, (written, entering[..., -1:]))
    out = (
        entering[..., None] * jnp.einsum("nbkcd,nbkgdv->nbkgcv", q, states)
        + (decay * products(q, k)) @ u
    )
    return joined(out, T), state


def chunked_trees(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, tree: Tree
) -> jax.Array:
    """Computes the recurrence along the paths of trees of a root and leaves, C tokens at a time:
    out [B, K, G, T, V].

    As in policy/recurrent/delta_rule.py, the path of a token enters a chunk with the running or
    with the kept state.
    """
    B, K, G, T, V = v.shape
    C = min(CHUNK, T)
    q, k, u, g = (
        in_chunks(a, axis, C) for a, axis in ((q, 2), (k, 2), (beta[..., None] * v, 3), (g, 3))
    )
    paths = Paths.of(tree, C)
    decay, entering = decays_along(g, paths)
    ends = paths.ends[:, :, None, None]
    # Up to the last token, for the next running state, and to the end of the last root, for the
    # next kept one.
    remaining = decay[..., -1, :, None], jnp.sum(ends[..., None] * decay, axis=-2)[..., None]
    written = tuple(jnp.einsum("nbkcd,nbkgcv->nbkgdv", k, each * u) for each in remaining)
    passed = (
        *(a[..., -1:, None] for a in entering),
        jnp.sum(ends * entering[0], axis=-1)[..., None, None],
    )
    no_end = 1.0 - jnp.sum(ends, axis=-1)[..., None, None]

    def chunk(states, xs):
        (running, kept), (written, passed, no_end) = states, xs
        after = passed[0] * running + passed[1] * kept + written[0]
        return (after, passed[2] * running + no_end * kept + written[1]), states

    empty = jnp.zeros((B, K, G, q.shape[-1], V), jnp.float32)
    _, states = jax.lax.scan(chunk, (empty, empty), (written, passed, no_end))
    out = (decay * products(q, k)) @ u
    for a, state in zip(entering, states, strict=True):
        out = out + a[..., None] * jnp.einsum("nbkcd,nbkgdv->nbkgcv", q, state)
    return joined(out, T)
