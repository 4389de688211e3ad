"""Log-probabilities and entropies of all rows with one tile of the vocabulary after another.

The forward pass sums exp(logit) online over the tiles. The backward pass needs the logits again: it
reads their products where `tiles.keeps` says so, 4 bytes for a row and token, and multiplies again
elsewhere. It writes the gradient of each tile once, into its place; only the gradient of the states
is summed over the tiles. Chunks of rows would read the projection, and read and write its gradient,
once for each chunk.

M tokens (rows and positions flattened), E hidden, V vocabulary, K targets per token, I ids that a
filter names per token; N tokens of a tile, X any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.config import LogitScaling
from policy.heads.logit_scaling import scaled, slope
from policy.heads.vocab_tiles import OneTile, Tile, Tiles, products


@dataclass(frozen=True)
class LocalTiles:
    """Tiles of `width` tokens of a projection that the device has in full; the last may be
    shorter. They have `vocab` tokens from `first` on. keeps: as in `Tiles`. A method without a
    docstring does what `Tiles` says of it; rows are local."""

    vocab: int
    width: int
    scaling: LogitScaling
    keeps: bool = False
    first: int = 0
    is_padded = False

    @classmethod
    def of(cls, vocab: int, least: int, scaling: LogitScaling, keeps: bool = False) -> LocalTiles:
        """Makes `least` tiles, or a few more where these divide the vocabulary."""
        count = next((n for n in range(least, 2 * least) if vocab % n == 0), least)
        return cls(vocab, -(-vocab // count), scaling, keeps)

    def cut(self, weight_VE: jax.Array) -> jax.Array:
        # `scan` slices the projection itself.
        return weight_VE

    def join(self, cut_VE: jax.Array) -> jax.Array:
        return cut_VE

    def rows(self, rows_MX: jax.Array) -> jax.Array:
        return rows_MX

    def summed(self, equation: str, g_MN: jax.Array, other: jax.Array, axes: tuple) -> jax.Array:
        """Computes einsum(equation, g, other) in float32."""
        return jnp.einsum(equation, g_MN, other, preferred_element_type=jnp.float32)

    def scan(self, one: OneTile, carry: Any, cut: Any, dtype: Any, kept: Any) -> tuple:
        """As `Tiles.scan`; what is returned by tile is a pair: of all full tiles, and of the last
        tile if it is shorter."""
        full, rest = divmod(self.vocab, self.width)
        kept, kept_rest = (None, None) if kept is None else kept

        def tile(j, size):
            start = self.first + j * self.width

            def part(weight_VE, dtype):
                return jax.lax.dynamic_slice_in_dim(weight_VE, start, size, axis=0).astype(dtype)

            ids = start + jnp.arange(size, dtype=jnp.int32)
            return Tile(j, jax.tree.map(part, cut, dtype), ids)

        def step(carry, xs):
            j, part = xs
            return one(carry, tile(j, self.width), part)

        if full == 1:
            carry, kept = one(carry, tile(0, self.width), kept)
        else:
            carry, kept = jax.lax.scan(step, carry, (jnp.arange(full), kept))
        if rest:
            carry, kept_rest = one(carry, tile(full, rest), kept_rest)
        return carry, (kept, kept_rest)

    def scaled(
        self,
        z_MN: jax.Array,
        ids_N: jax.Array,
        temperature: jax.Array,
        left_out_MI: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        z = scaled(z_MN, self.scaling)
        slope_MN = slope(z, self.scaling) / temperature
        z = z / temperature
        if left_out_MI is not None:
            z = z.at[_places(left_out_MI, ids_N)].set(-jnp.inf, mode="drop")
        return z, slope_MN

    def at(self, z_MN: jax.Array, targets_MK: jax.Array, tile: Tile) -> jax.Array:
        return z_MN.at[_places(targets_MK, tile.ids)].get(mode="fill", fill_value=0.0)

    def add_at(
        self, z_MN: jax.Array, targets_MK: jax.Array, values_MK: jax.Array, tile: Tile
    ) -> jax.Array:
        if targets_MK.shape[1] == 1:  # a comparison is a part of the pass that makes z
            return z_MN + jnp.where(targets_MK == tile.ids, values_MK, 0.0)
        return z_MN.at[_places(targets_MK, tile.ids)].add(values_MK, mode="drop")

    def no_gradient(self, cut_VE: jax.Array, dtype: DTypeLike) -> jax.Array:
        return jnp.zeros(cut_VE.shape, dtype)

    def with_gradient(
        self, g_cut: jax.Array, g_MN: jax.Array, hidden_ME: jax.Array, tile: Tile
    ) -> jax.Array:
        g_tile = self.summed("mn,me->ne", g_MN, hidden_ME, ()).astype(g_cut.dtype)
        start = self.first + tile.number * self.width
        return jax.lax.dynamic_update_slice_in_dim(g_cut, g_tile, start, axis=0)


def _places(tokens_MK: jax.Array, ids_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the index of tokens in the rows of a tile; of others it lies outside of the tile."""
    M = tokens_MK.shape[0]
    N = ids_N.shape[0]
    places = tokens_MK - ids_N[0]
    return jnp.arange(M)[:, None], jnp.where((places >= 0) & (places < N), places, N)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def logprobs(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    targets_MK: jax.Array,
    temperature: jax.Array,
    left_out_MI: jax.Array | None,
    tiles: Tiles | LocalTiles,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp [M, K] of the targets, entropy [M]), float32. Both are differentiable in hidden
    and weight.

    left_out_MI: as in policy/heads/head.py:logprobs.
    """
    arrays = hidden_ME, weight_VE, targets_MK, temperature, left_out_MI
    return _scored(*arrays, tiles, keeps=False).results


class _Scored(NamedTuple):
    """The results of `logprobs`, and what the backward pass reads: the logarithm of the softmax sum
    [M], and the products of all tiles, or None."""

    logp: jax.Array
    entropy: jax.Array
    normal: jax.Array
    kept: Any

    @property
    def results(self) -> tuple[jax.Array, jax.Array]:
        return self.logp, self.entropy


def _scored(hidden, weight, targets, temperature, left_out, tiles, *, keeps: bool) -> _Scored:
    """Sums the softmax over all tiles.

    The sums are of e = exp(z - the largest z) and of (z - the largest z) e, so that an entropy is
    no difference of large numbers.
    """
    M = hidden.shape[0]
    has_zeros = left_out is not None or tiles.is_padded  # numbers whose logit is -inf

    def one(carry, tile, _):
        top, total, weighed, at_targets = carry
        product = products(hidden, tile.weights)
        z, _ = tiles.scaled(product, tile.ids, temperature, left_out)
        new = jnp.maximum(top, z.max(axis=1))
        below = z - new[:, None]
        e = jnp.exp(below)
        weighed_e = jnp.where(e > 0, below * e, 0.0) if has_zeros else below * e
        shrunk = jnp.exp(top - new)
        weighed = shrunk * (weighed + (top - new) * total) + weighed_e.sum(axis=1)
        total = shrunk * total + e.sum(axis=1)
        sums = new, total, weighed, at_targets + tiles.at(z, targets, tile)
        return sums, product if keeps else None

    low = jnp.finfo(jnp.float32).min  # not -inf: all ids of the first tiles may be left out
    start = jnp.full(M, low), jnp.zeros(M), jnp.zeros(M), jnp.zeros(targets.shape)
    carry = tuple(map(tiles.rows, start))
    sums, kept = tiles.scan(one, carry, tiles.cut(weight), hidden.dtype, None)
    top, total, weighed, at_targets = sums
    log_total = jnp.log(total)
    normal = top + log_total
    return _Scored(at_targets - normal[:, None], log_total - weighed / total, normal, kept)


def _forward(hidden, weight, targets, temperature, left_out, tiles):
    arrays = hidden, weight, targets, temperature, left_out
    scored = _scored(*arrays, tiles, keeps=tiles.keeps)
    return scored.results, (*arrays, scored.normal, scored.entropy, scored.kept)


def _backward(tiles, saved, cotangents):
    """Computes the gradients of hidden and weight.

    d logp / dz = onehot - p and d H / dz = -p (log p + H), both divided by the temperature; the
    scaling of logits adds the factor `slope`. Ids that are left out have p = 0.
    """
    hidden, weight, targets, temperature, left_out, normal, entropy, kept = saved
    g_logp, g_entropy = cotangents
    cut = tiles.cut(weight)
    g_all = g_logp.sum(axis=1, keepdims=True)

    def one(carry, tile, product):
        g_hidden, g_cut = carry
        if product is None:
            product = products(hidden, tile.weights)
        z, slope_MN = tiles.scaled(product, tile.ids, temperature, left_out)
        log_p = z - normal[:, None]
        p = jnp.exp(log_p)
        spread = g_all + g_entropy[:, None] * jnp.where(p > 0, log_p + entropy[:, None], 0.0)
        g_z = tiles.add_at(-p * spread, targets, g_logp, tile) * slope_MN
        g_z = g_z.astype(hidden.dtype)
        g_hidden = g_hidden + tiles.summed("mn,ne->me", g_z, tile.weights, ("batch", None))
        return (g_hidden, tiles.with_gradient(g_cut, g_z, hidden, tile)), None

    start = (
        tiles.rows(jnp.zeros(hidden.shape, jnp.float32)),
        tiles.no_gradient(cut, weight.dtype),
    )
    kept = kept if tiles.keeps else None
    (g_hidden, g_cut), _ = tiles.scan(one, start, cut, hidden.dtype, kept)
    return g_hidden.astype(hidden.dtype), tiles.join(g_cut), None, None, None


logprobs.defvjp(_forward, _backward)
