"""Rows of trees, and attention over the paths of their tokens, for the tests of attention."""

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.paths import Tree


def trees(rows, T) -> Tree:
    """The tables of trees, with padding up to T tokens."""
    tables = {name: np.full((len(rows), T), fill, np.int32) for name, fill in Tree.FILLS.items()}
    for r, roots in enumerate(rows):
        place = number = 0

        def add(node, position, before, r=r):
            nonlocal place, number
            size, children = node
            at, number = np.arange(place, place + size), number + 1
            tables["node"][r, at], tables["position"][r, at] = number, position + np.arange(size)
            tables["before"][r, at] = np.append(before, at[:-1])
            place += size
            for child in children:
                add(child, position + size, at[-1])
            tables["last"][r, at] = number

        for root in roots:
            add(root, 0, -1)
    return Tree(**tables)


def seen(before, position, window=None, chunk=None):
    """bool[B, T, T] from the definition: a token sees those that are before it, by one step at a
    time, and itself."""
    allowed = np.zeros((*before.shape, before.shape[1]), bool)
    for r, t in np.ndindex(before.shape):
        at = t
        while at >= 0:
            near = window is None or position[r, t] - position[r, at] < window
            allowed[r, t, at] = near and (
                chunk is None or position[r, t] // chunk == position[r, at] // chunk
            )
            at = before[r, at]
    return allowed


def reference(allowed, softcap, q, k, v, sinks=None):
    """The softmax over what each query sees, [B, H, T, V]. sinks: one more score of each head,
    without a value."""
    k, v = (jnp.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    scores = jnp.einsum("bhtd,bhcd->bhtc", q, k)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    e = jnp.exp(jnp.where(allowed[:, None], scores, -jnp.inf))
    total = e.sum(axis=-1, keepdims=True) + (
        0.0 if sinks is None else jnp.exp(sinks[:, None, None])
    )
    return jnp.einsum("bhtc,bhcd->bhtd", e / jnp.where(total > 0, total, 1.0), v)


def arrays(B, T, heads, dtype=jnp.float32):
    """Queries, keys, values and what the result is multiplied by, with scores up to about 5."""
    H, K, D, V = heads
    sizes = ((H, D, 1), (K, D, 1), (K, V, 2), (H, V, 2))
    return tuple(
        scale * jax.random.normal(jax.random.key(i), (B, n, T, dim), dtype) / dim**0.25
        for i, (n, dim, scale) in enumerate(sizes)
    )
