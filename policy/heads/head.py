"""From hidden states to logits, and to log-probabilities and entropies without ever holding logits of all tokens.

M tokens (rows and positions flattened), E hidden, V vocabulary, K tokens asked about at one place. All logits are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.heads import vocab_tiles
from policy.heads.vocab_tiles import Tiles
from policy.mesh.explicit import in_explicit_mode, over_devices, with_explicit_axes
from policy.mesh.sharding import Layout
from policy.ops.projection import Projection

# Logits of a chunk unless the number of chunks is set: 2^24 float32 are 64 MiB.
CHUNK_LOGITS = 1 << 24


def logits(hidden_ME: jax.Array, weight_VE: jax.Array | Projection, softcap: float | None = None) -> jax.Array:
    """hidden @ weight^T as float32, bounded by softcap * tanh(z / softcap) if there is one; any leading dimensions."""
    if isinstance(weight_VE, Projection):
        E = hidden_ME.shape[-1]
        z = weight_VE.product(hidden_ME.reshape(-1, E)).reshape(*hidden_ME.shape[:-1], -1)
    else:
        z = jnp.einsum(
            "...e,ve->...v", hidden_ME, weight_VE.astype(hidden_ME.dtype), preferred_element_type=jnp.float32
        )
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


@dataclass(frozen=True)
class Tiling:
    """How the rows are worked through. `tiles`: in so many chunks, the last one filled up where they do not divide; None: as few
    as have at most CHUNK_LOGITS logits. `layout`: the devices over which rows are spread, each of which works on its own rows
    with the whole weight, or its part of the vocabulary."""

    tiles: int | None = None
    layout: Layout | None = None

    def rows(self, M: int, V: int) -> int:
        """Rows of a chunk."""
        return max(1, min(M, CHUNK_LOGITS // V) if self.tiles is None else -(-M // self.tiles))

    def of_vocabulary(self, M: int, weight_VE: jax.Array, softcap: float | None) -> Tiles | None:
        """Tiles of the vocabulary in place of chunks of rows, where the devices that share the rows share E too, or, with
        shardings stated, any part of the weight."""
        cut = (None, None) if self.layout is None else self.layout.spec(("vocab", "embed_vocab"), weight_VE.shape)
        if cut[1] is None and not (in_explicit_mode() and cut[0]):
            return None
        V = weight_VE.shape[0]
        rows = self.layout.sharding(("batch",), (M,)).shard_shape((M,))[0]
        return Tiles.of(self.layout, V, self.tiles or -(-rows * V // CHUNK_LOGITS), softcap)

    def spread(self, function, M: int, *row_inputs: bool):
        """`function` run by every device on its own rows; `row_inputs` says which of its arguments have rows, all results do.

        Left to itself the partitioner cuts the chunks, not the rows, over the devices: every chunk's logits are then added up
        between them, M V numbers twice a step in place of one weight V E.
        """
        axes = None if self.layout is None else self.layout.spec(("batch",), (M,))[0]
        if not axes and not in_explicit_mode():
            return function
        rows, whole = PartitionSpec(axes), PartitionSpec()
        if in_explicit_mode():
            places = tuple(rows if has else whole for has in row_inputs)
            return over_devices(function, self.layout.mesh, places, rows, check_vma=False)
        manual = {axes} if isinstance(axes, str) else set(axes)
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=tuple(rows if has else whole for has in row_inputs),
            out_specs=rows,
            axis_names=manual,
            check_vma=False,
        )


def logprobs(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    targets: jax.Array,
    temperature,
    softcap: float | None = None,
    tiling: Tiling = Tiling(),
) -> tuple[jax.Array, jax.Array]:
    """(logp, entropy): log softmax(logits / temperature) at `targets`, int[M] or several a token int[M, K], in the shape of
    `targets`, and the entropy of that distribution, [M]. float32.

    Works through the tokens in chunks; the backward pass computes the logits again, so nothing of size [M, V] is kept.
    Differentiable in hidden and weight, through both results: a loss may be made of them at will.
    """

    def local(hidden, weight, targets, temperature):
        M = hidden.shape[0]
        cut = _cut(tiling.rows(M, weight.shape[0]), hidden, targets)
        logp, entropy = _chunked(cut[0], weight, cut[1], temperature, softcap)
        return logp.reshape(-1, targets.shape[1])[:M], entropy.reshape(-1)[:M]

    M, temperature = hidden_ME.shape[0], jnp.asarray(temperature, jnp.float32)
    if tiling.layout is not None and tiling.layout.explicit and not in_explicit_mode():
        rows = tiling.layout.spec(("batch",), (M,))
        places = rows, tiling.layout.spec(("vocab", "embed_vocab"), weight_VE.shape), rows, PartitionSpec()
        run = partial(logprobs, softcap=softcap, tiling=tiling)
        return with_explicit_axes(run, tiling.layout.mesh, places)(hidden_ME, weight_VE, targets, temperature)
    if (tiles := tiling.of_vocabulary(M, weight_VE, softcap)) is not None:
        logp, entropy = vocab_tiles.logprobs(hidden_ME, weight_VE, targets.reshape(M, -1), temperature, tiles)
    else:
        run = tiling.spread(local, M, True, False, True, False)
        logp, entropy = run(hidden_ME, weight_VE, targets.reshape(M, -1), temperature)
    return logp.reshape(targets.shape), entropy


def top_logprobs(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    k: int,
    temperature,
    softcap: float | None = None,
    tiling: Tiling = Tiling(),
) -> tuple[jax.Array, jax.Array]:
    """(logp float32[M, k], ids int32[M, k]) of the k likeliest tokens, likeliest first, lowest id first among equals; in the same
    chunks. Not differentiable: for gradients give `ids` to `logprobs`."""

    def local(hidden, weight, temperature):
        def one(h):
            return jax.lax.top_k(_log_softmax(logits(h, weight, softcap), temperature), k)

        M = hidden.shape[0]
        found = jax.lax.map(one, *_cut(tiling.rows(M, weight.shape[0]), hidden))
        return tuple(a.reshape(-1, k)[:M] for a in found)

    run = tiling.spread(local, hidden_ME.shape[0], True, False, False)
    return jax.lax.stop_gradient(run(hidden_ME, weight_VE, jnp.asarray(temperature, jnp.float32)))


def _cut(rows: int, *arrays: jax.Array) -> list[jax.Array]:
    """Each [M, X] as chunks [n, rows, X], filled up with zeros."""
    return [jnp.pad(a, ((0, -a.shape[0] % rows), (0, 0))).reshape(-1, rows, a.shape[1]) for a in arrays]


def likeliest(
    hidden_ME: jax.Array, weight_VE: jax.Array, softcap: float | None = None, tiling: Tiling = Tiling()
) -> jax.Array:
    """int32[M]: the token of the largest logit, in the same chunks. No gradient."""

    def local(hidden, weight):
        M = hidden.shape[0]
        best = jax.lax.map(
            lambda h: jnp.argmax(logits(h, weight, softcap), axis=-1), *_cut(tiling.rows(M, weight.shape[0]), hidden)
        )
        return best.reshape(-1)[:M].astype(jnp.int32)

    run = tiling.spread(local, hidden_ME.shape[0], True, False)
    return run(*jax.lax.stop_gradient((hidden_ME, weight_VE)))


def _log_softmax(z, temperature):
    z = z / temperature
    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden, weight, targets, temperature, softcap):
    def one(xs):
        log_p = _log_softmax(logits(xs[0], weight, softcap), temperature)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.take_along_axis(log_p, xs[1], axis=-1), entropy

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
        g_z = -p * (g_logp.sum(axis=-1, keepdims=True) + g_ent[:, None] * (log_p + ent[:, None]))
        g_z = g_z.at[jnp.arange(t.shape[0])[:, None], t].add(g_logp, unique_indices=t.shape[1] == 1)
        if softcap is not None:
            g_z = g_z * (1.0 - jnp.square(z / softcap))
        g_z = (g_z / temperature).astype(h.dtype)
        g_weight = g_weight + jnp.einsum("mv,me->ve", g_z, h, preferred_element_type=jnp.float32)
        return g_weight, g_z @ w

    start = jnp.zeros(weight.shape, jnp.float32)
    g_weight, g_hidden = jax.lax.scan(one, start, (hidden, targets, entropy, *cotangents))
    return g_hidden, g_weight.astype(weight.dtype), None, None


_chunked.defvjp(_forward, _backward)
