"""The recurrence of the gated delta net (arXiv 2412.06464): token by token, in chunks, and in
chunks over trees.

A state S [D, V] decays by e^g, loses what it holds under the key k, and gets beta v in its place:
S_t = e^g S_(t-1) + k_t u_t^T, u_t = beta_t (v_t - e^g S_(t-1)^T k_t); the output is S_t^T q_t.

B rows, T tokens, K key heads, G value heads of a key head, D and V dimensions of keys and values, N
chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from policy.cache.paths import Tree

CHUNK = 64


def single(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence for one token: (out [B, K, G, 1, V], state). Arguments as in
    `chunked`, with T = 1.

    The state is read once for k and q: S^T q = e^g S_before^T q + (k . q) u.
    """
    decay = jnp.exp(g)[..., None]
    seen = jnp.einsum("bkxd,bkgdv->bkgxv", jnp.concatenate([k, q], axis=2), state_BKGDV)
    written = beta[..., None] * (v - decay * seen[..., :1, :])
    match = jnp.sum(k * q, axis=-1)[:, :, None, :, None]
    out = decay * seen[..., 1:, :] + match * written
    return out, decay * state_BKGDV + k.swapaxes(2, 3)[:, :, None] * written


def stepwise(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state_BKGDV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the recurrence token by token: (out [B, K, G, T, V], states after each token [B, T,
    K, G, D, V])."""
    return token_by_token(single, (q, k, v, beta, g), (2, 2, 3, 3, 3), state_BKGDV)


def token_by_token(
    single: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    axes: tuple[int, ...],
    state_BKGDV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs `single`, the recurrence of one token, over all tokens. axes: of the tokens in each of
    the inputs. Returns what `stepwise` returns."""

    def one(state, xs):
        token = (jnp.expand_dims(x, axis) for x, axis in zip(xs, axes, strict=True))
        out, state = single(*token, state)
        return state, (out[:, :, :, 0], state)

    xs = tuple(jnp.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True))
    _, (out, states) = jax.lax.scan(one, state_BKGDV, xs)
    return jnp.moveaxis(out, 0, 3), jnp.moveaxis(states, 0, 1)


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
    last token).

    q, k [B, K, T, D]; v [B, K, G, T, V]; beta, g [B, K, G, T]. Within a chunk the written values
    u_i = beta_i (v_i - S_i^T k_i) solve a unit lower triangular system (section 3.3): u = alone
    - taken S, with S the state before the chunk, `alone` what the chunk writes from an empty state,
    and `taken` what it takes from S. These and all else that does not depend on S are computed for
    all chunks at once; three products remain in the scan.
    """
    T = v.shape[3]
    C = min(CHUNK, T)
    q, k, v, beta, g = (
        in_chunks(a, axis, C) for a, axis in ((q, 2), (k, 2), (v, 3), (beta, 3), (g, 3))
    )
    decay, entering = decays(g, in_chunks(documents_BT, 1, C, mode="edge"))
    solution = unit_lower_inverse(beta[..., None] * decay * products(k, k)) * beta[..., None, :]
    alone = solution @ v
    taken = (solution * entering[..., None, :]) @ k[:, :, :, None]
    remaining = decay[..., -1, :, None]

    def chunk(state, xs):
        alone, taken, k, remaining, kept = xs
        u = alone - taken @ state
        after = kept[..., None] * state + jnp.einsum("bkcd,bkgcv->bkgdv", k, remaining * u)
        return after, (state, u)

    state, (states, u) = jax.lax.scan(
        chunk, state_BKGDV, (alone, taken, k, remaining, entering[..., -1:])
    )
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

    Arguments as in `chunked`. The path of a token enters a chunk with one of two states: the
    running one, after the token before the chunk, or the kept one, after the last root with leaves
    that ended before the chunk. What a chunk writes depends on both: u = alone -
    taken_running S_running - taken_kept S_kept.
    """
    B, K, G, T, V = v.shape
    C = min(CHUNK, T)
    q, k, v, beta, g = (
        in_chunks(a, axis, C) for a, axis in ((q, 2), (k, 2), (v, 3), (beta, 3), (g, 3))
    )
    paths = Paths.of(tree, C)
    decay, entering = decays_along(g, paths)
    solution = unit_lower_inverse(beta[..., None] * decay * products(k, k)) * beta[..., None, :]
    alone = solution @ v
    taken = tuple((solution * a[..., None, :]) @ k[:, :, :, None] for a in entering)
    ends = paths.ends[:, :, None, None]
    # `remaining`: the decay of each value that the chunk writes; `passed`: that of the states that
    # enter it. Each up to the last token, for the next running state, and up to the end of the last
    # root, for the next kept state. A root begins anew, so nothing of the old kept state enters the
    # next. The states are two arrays: XLA for CPUs (jax 0.10.2) crashes in a transposition if they
    # are one with an axis more.
    remaining = decay[..., -1, :, None], jnp.sum(ends[..., None] * decay, axis=-2)[..., None]
    passed = (
        *(a[..., -1:, None] for a in entering),
        jnp.sum(ends * entering[0], axis=-1)[..., None, None],
    )
    no_end = 1.0 - jnp.sum(ends, axis=-1)[..., None, None]

    def chunk(states, xs):
        (running, kept), (alone, taken, k, remaining, passed, no_end) = states, xs
        u = alone - taken[0] @ running - taken[1] @ kept
        written = [jnp.einsum("bkcd,bkgcv->bkgdv", k, each * u) for each in remaining]
        after = (
            passed[0] * running + passed[1] * kept + written[0],
            passed[2] * running + no_end * kept + written[1],
        )
        return after, (states, u)

    empty = jnp.zeros((B, K, G, q.shape[-1], V), jnp.float32)
    _, (states, u) = jax.lax.scan(
        chunk, (empty, empty), (alone, taken, k, remaining, passed, no_end)
    )
    out = (decay * products(q, k)) @ u
    for a, state in zip(entering, states, strict=True):
        out = out + a[..., None] * jnp.einsum("nbkcd,nbkgdv->nbkgcv", q, state)
    return joined(out, T)


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """Computes the inverse of I + tril(a, -1), [..., C, C], from blocks of size 1 to C, two
    neighbours at a time: [[x, 0], [y, z]]^-1 = [[x^-1, 0], [-z^-1 y x^-1, z^-1]].

    It uses products only. On CPU a batched triangular solve calls a threaded BLAS, which is slow
    and can hang in a backward pass. The series I - a + a^2 - ... loses all digits for equal keys.
    """
    C = a.shape[-1]

    def quarters(size):
        """Returns the lower left quarters y of the diagonal blocks of size 2 `size`."""
        block = jnp.arange(C) // size
        return jnp.where((block[:, None] // 2 == block // 2) & (block[:, None] > block), a, 0)

    inverse = jnp.eye(C, dtype=a.dtype) - quarters(1)
    size = 2
    while size < C:
        inverse = inverse - inverse @ quarters(size) @ inverse
        size *= 2
    return inverse


def _inverse_forward(a):
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    with jax.default_matmul_precision("highest"):  # traced outside the caller's context
        return (-jnp.tril(transposed @ cotangent @ transposed, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def joined(out_NBKGCV: jax.Array, T: int) -> jax.Array:
    """Joins the chunks of T tokens: [B, K, G, T, V]."""
    out = jnp.moveaxis(out_NBKGCV, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :T]


def in_chunks(a: jax.Array, axis: int, C: int, mode: str = "constant") -> jax.Array:
    """Pads the tokens of `a`, along `axis`, to a multiple of C and splits them into chunks: [N,
    ..., C, ...]."""
    pad = [(0, 0)] * a.ndim
    pad[axis] = (0, -a.shape[axis] % C)
    a = jnp.pad(a, pad, mode=mode)
    return jnp.moveaxis(a.reshape(*a.shape[:axis], -1, C, *a.shape[axis + 1 :]), axis, 0)


def products(a_NBKCD: jax.Array, b_NBKCD: jax.Array) -> jax.Array:
    """Returns [N, B, K, 1, C, C]: a_i . b_j, the same for all value heads of a key head."""
    return jnp.einsum("nbkid,nbkjd->nbkij", a_NBKCD, b_NBKCD)[:, :, :, None]


def decays(g_NBKGC: jax.Array, documents_NBC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the decay at token i of the value that token j wrote, [N, B, K, G, C, C], and of the
    state before the chunk, [N, B, K, G, C]; 0 for the future and for other documents.

    The logarithms of the pairs are sums over j < l <= i. Differences of one cumulative sum would
    lose digits after a strong decay: float32 has a spacing of 6e-5 at 1000. The upper half is
    masked before the exponential, where it would overflow.
    """
    C = g_NBKGC.shape[-1]
    later = jnp.tril(jnp.ones((C, C), bool), -1)
    pairs = jnp.cumsum(jnp.where(later, g_NBKGC[..., :, None], 0.0), axis=-2)
    same = documents_NBC[..., :, None] == documents_NBC[..., None, :]
    allowed = (same & jnp.tril(jnp.ones((C, C), bool)))[:, :, None, None]
    first = jnp.zeros_like(documents_NBC[:1, :, -1:])
    carried = documents_NBC == jnp.concatenate([first, documents_NBC[:-1, :, -1:]])
    total = jnp.where(carried[:, :, None, None], jnp.cumsum(g_NBKGC, axis=-1), -jnp.inf)
    return jnp.exp(jnp.where(allowed, pairs, -jnp.inf)), jnp.exp(total)


class Paths(NamedTuple):
    """What chunks of C tokens need to know of the paths of trees.

    along: bool[N, B, C, C], whether token j is on the path of token i. running, kept: bool[N, B,
    C], whether the path of token i enters the chunk with that state. ends: float32[N, B, C], 1 at
    the end of the chunk's last root that has leaves, 0 elsewhere.
    """

    along: jax.Array
    running: jax.Array
    kept: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, tree: Tree, C: int) -> Paths:
        padding = (0, 0), (0, -tree.node.shape[1] % C)
        node, last = (in_chunks(a, 1, C) for a in (tree.node, tree.last))
        before = in_chunks(jnp.pad(tree.before, padding, constant_values=-1), 1, C)
        index = jnp.arange(C)
        own = node[..., :, None]
        first_below = node[..., None, :]
        last_below = last[..., None, :]
        along = (first_below <= own) & (own <= last_below) & (index <= index[:, None])
        first_on_path = jnp.argmax(along, axis=-1)
        entry = jnp.take_along_axis(before, first_on_path, axis=-1)
        before_chunk = C * jnp.arange(len(node))[:, None, None] - 1
        following = jnp.pad(tree.node[:, 1:], ((0, 0), (0, 1)))
        ends = in_chunks((tree.last > tree.node) & (following != tree.node), 1, C)
        latest = jnp.max(jnp.where(ends, index, -1), axis=-1, keepdims=True)
        real = entry >= 0
        return cls(
            along,
            real & (entry == before_chunk),
            real & (entry != before_chunk),
            (index == latest).astype(jnp.float32),
        )


def decays_along(g_NBKGC: jax.Array, paths: Paths) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the decays of `decays` along paths: of values [N, B, K, G, C, C], and of the running
    and the kept state before the chunk, [N, B, K, G, C] each; 0 for what is not on the path."""
    C = g_NBKGC.shape[-1]
    along = paths.along[:, :, None, None]
    later = jnp.tril(jnp.ones((C, C), bool), -1)
    weights = along.astype(jnp.float32)
    pairs = weights @ jnp.where(later, g_NBKGC[..., :, None], 0.0)
    total = jnp.einsum("nbkgil,nbkgl->nbkgi", weights, g_NBKGC)
    running, kept = (
        jnp.exp(jnp.where(here[:, :, None, None], total, -jnp.inf))
        for here in (paths.running, paths.kept)
    )
    return jnp.exp(jnp.where(along, pairs, -jnp.inf)), (running, kept)
