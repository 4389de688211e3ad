"""Tiles of the vocabulary where devices share the output projection: along E those that share the
rows, along V others.

All rows are computed with one tile of the vocabulary after another (policy/heads/tiled.py): devices
exchange a tile of the projection, use it and drop it, and the gradient of a tile is summed over the
devices and stored where the tile is stored. Chunks of rows would need the full projection on every
device, and a float32 gradient of its size: 1 and 2 GiB for llama3.1-8b.

M tokens (rows and positions flattened), E hidden, V vocabulary, K targets per token, I ids that a
filter names per token; P parts into which the mesh cuts V, n tiles of P x W tokens, N tokens of a
tile; X any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.config import LogitScaling
from policy.heads.logit_scaling import scaled, slope
from policy.mesh.explicit import in_explicit_mode
from policy.mesh.sharding import Layout, annotate, constrain

Carry = TypeVar("Carry")


class Tile(NamedTuple):
    """A tile: its number, its weights [N, E] on every device, of several projections in a tuple,
    and its tokens int32[N]."""

    number: Any
    weights: Any
    ids: jax.Array


OneTile = Callable[[Any, Tile, Any], tuple[Any, Any]]
"""(carry, tile, what was kept of it) -> (carry, what to keep of it)."""


@dataclass(frozen=True)
class Tiles:
    """`count` tiles of `parts` x `width` tokens; numbers from `vocab` on are no tokens.

    keeps: whether the products of all tiles are kept between the forward and the backward pass.
    """

    layout: Layout
    vocab: int
    parts: int
    count: int
    width: int
    scaling: LogitScaling
    keeps: bool = False

    @classmethod
    def of(
        cls, layout: Layout, vocab: int, least: int, scaling: LogitScaling, keeps: bool = False
    ) -> Tiles:
        """Makes `least` tiles, or a few more where these divide the vocabulary."""
        parts = vocab // layout.sharding(("vocab",), (vocab,)).shard_shape((vocab,))[0]
        each = vocab // parts
        count = next((n for n in range(least, 2 * least) if each % n == 0), least)
        return cls(layout, vocab, parts, count, -(-each // count), scaling, keeps)

    @property
    def is_padded(self) -> bool:
        """Returns whether some numbers of tiles are no tokens."""
        return self.parts * self.count * self.width > self.vocab

    def cut(self, weight_VE: jax.Array) -> jax.Array:
        """Cuts the projection into tiles [P, n, W, E]."""
        E = weight_VE.shape[1]
        room = self.parts * self.count * self.width
        if room > self.vocab:
            weight_VE = jnp.pad(weight_VE, ((0, room - self.vocab), (0, 0)))
        return self.constrain_tiles(weight_VE.reshape(self.parts, self.count, self.width, E))

    def join(self, cut_PnWE: jax.Array) -> jax.Array:
        """Returns tiles [P, n, W, E] of `cut` as the projection [V, E], without padding."""
        return cut_PnWE.reshape(-1, cut_PnWE.shape[-1])[: self.vocab]

    def tile(self, cut: Any, j: Any, dtype: Any) -> Tile:
        """Returns tile j. cut: tiles [P, n, W, E] of a projection, or of several in a tuple, as
        `dtype` then is."""

        def weights(cut_PnWE, dtype):
            P, _, W, E = cut_PnWE.shape
            one = jax.lax.dynamic_index_in_dim(cut_PnWE, j, axis=1, keepdims=False).astype(dtype)
            return constrain(one, ("vocab", None, None), self.layout).reshape(P * W, E)

        W = self.width
        ids = (jnp.arange(self.parts)[:, None] * self.count + j) * W + jnp.arange(W)
        on_devices = annotate(ids.reshape(-1), ("vocab",), self.layout)
        return Tile(j, jax.tree.map(weights, cut, dtype), on_devices)

    def constrain_tiles(self, cut_PnWE: jax.Array) -> jax.Array:
        """Constrains tiles to the sharding in which the projection is stored."""
        return constrain(cut_PnWE, ("vocab", None, None, "embed_vocab"), self.layout)

    def rows(self, rows_MX: jax.Array) -> jax.Array:
        """Shards rows as hidden states are sharded, in explicit mode."""
        return annotate(rows_MX, ("batch", *[None] * (rows_MX.ndim - 1)), self.layout)

    def summed(self, equation: str, g_MN: jax.Array, other: jax.Array, axes: tuple) -> jax.Array:
        """Computes einsum(equation, g, other) in float32, over a dimension that devices share.
        axes: of the result."""
        options: dict[str, Any] = {}
        if in_explicit_mode():
            sizes = dict(zip(equation[:2], g_MN.shape, strict=True))
            sizes |= dict(zip(equation[3:5], other.shape, strict=True))
            options["out_sharding"] = self.layout.spec(
                axes, tuple(sizes[letter] for letter in equation[-2:])
            )
        return jnp.einsum(equation, g_MN, other, preferred_element_type=jnp.float32, **options)

    def scaled(
        self,
        z_MN: jax.Array,
        ids_N: jax.Array,
        temperature: jax.Array,
        left_out_MI: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (logits / temperature, their derivative by the products), float32[M, N], from the
        products z of states and weights.

        The logits of numbers that are no tokens, and of the ids `left_out` of a row, are -inf.
        """
        z = scaled(z_MN, self.scaling)
        slope_MN = slope(z, self.scaling) / temperature
        allowed = ids_N < self.vocab
        if left_out_MI is not None:
            allowed = allowed & ~jnp.any(left_out_MI[:, :, None] == ids_N, axis=1)
        return jnp.where(allowed, z / temperature, -jnp.inf), slope_MN

    def scan(self, one: OneTile, carry: Carry, cut: Any, dtype: Any, kept: Any) -> tuple:
        """Runs `one` over the tiles of `tile(cut, j, dtype)`. Returns (the last carry, what `one`
        returned to keep, by tile).

        kept: the second result of an earlier scan, from which every tile gets its part; None: none.
        """

        def step(carry, xs):
            j, part = xs
            return one(carry, self.tile(cut, j, dtype), part)

        return jax.lax.scan(step, carry, (jnp.arange(self.count), kept))

    def at(self, z_MN: jax.Array, targets_MK: jax.Array, tile: Tile) -> jax.Array:
        """Returns the numbers of the targets that lie in the tile, 0 for others, [M, K]."""
        here = targets_MK[:, :, None] == tile.ids
        return jnp.where(here, z_MN[:, None], 0.0).sum(axis=2)

    def add_at(
        self, z_MN: jax.Array, targets_MK: jax.Array, values_MK: jax.Array, tile: Tile
    ) -> jax.Array:
        """Adds `values` to the numbers of the targets that lie in the tile."""
        here = targets_MK[:, :, None] == tile.ids
        return z_MN + jnp.where(here, values_MK[:, :, None], 0.0).sum(axis=1)

    def no_gradient(self, cut_PnWE: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns zeros for the gradients of all tiles."""
        return self.constrain_tiles(jnp.zeros(cut_PnWE.shape, dtype))

    def with_gradient(
        self, g_cut: jax.Array, g_MN: jax.Array, hidden_ME: jax.Array, tile: Tile
    ) -> jax.Array:
        """Returns the gradients of all tiles with the gradient of this tile."""
        g_tile = self.summed("mn,me->ne", g_MN, hidden_ME, ("vocab", None)).astype(g_cut.dtype)
        g_tile = self.constrain_tiles(g_tile.reshape(self.parts, 1, self.width, -1))
        return jax.lax.dynamic_update_slice_in_dim(g_cut, g_tile, tile.number, axis=1)


def products(hidden_ME: jax.Array, tile_NE: jax.Array) -> jax.Array:
    """Returns the products of states and weights of a tile, float32[M, N]."""
    return jnp.einsum("me,ne->mn", hidden_ME, tile_NE, preferred_element_type=jnp.float32)


def add_exp(sums: tuple[jax.Array, jax.Array], z_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds logits to (largest logit [M], sum of exp(logit - largest) [M]); the largest of all is
    not -inf."""
    top, total = sums
    new = jnp.maximum(top, z_MN.max(axis=1))
    return new, total * jnp.exp(top - new) + jnp.exp(z_MN - new[:, None]).sum(axis=1)


class TopTokens(NamedTuple):
    """The k likeliest tokens in each of M places, likeliest first, lowest id first among equals.

    logp: float32[M, k], their log-probabilities. ids: int32[M, k]. rest: float32[M], the logarithm
    of the probability of all other tokens; -inf if there are none. target: float32[M], the
    log-probability of the token that was asked for; None: none was.
    """

    logp: jax.Array
    ids: jax.Array
    rest: jax.Array
    target: jax.Array | None = None


def top_and_rest(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    k: int,
    temperature: jax.Array,
    tiles: Tiles,
    vocab: int,
    targets_M: jax.Array | None = None,
) -> TopTokens:
    """Returns the results of policy/heads/head.py:top_and_rest over the first `vocab` tokens,
    without a gradient.

    Each part of a tile names its k likeliest tokens, so devices exchange these and no logits.
    """
    M = hidden_ME.shape[0]
    cut = tiles.cut(weight_VE)
    layout = tiles.layout
    # Of places that no token has yet: exp is 0 and differences are numbers.
    low = jnp.finfo(jnp.float32).min
    spec = layout.spec(("batch", "vocab", None), (M, tiles.parts, tiles.width))
    # The partitioner may send all logits to every device for a top_k of rows.
    largest_of_parts = jax.shard_map(
        partial(jax.lax.top_k, k=min(k, tiles.width)),
        mesh=layout.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )

    def likeliest(z, ids):
        """Sorts rows of candidates: the largest logit first, the lowest token among equals."""
        negative, ids = jax.lax.sort((-z, ids), dimension=1, num_keys=2)
        return -negative[:, :k], ids[:, :k]

    def one(j, carry):
        top, likely_ids, rest, *at_target = carry
        tile = tiles.tile(cut, j, hidden_ME.dtype)
        ids = tile.ids
        z, _ = tiles.scaled(products(hidden_ME, tile.weights), ids, temperature, None)
        z = jnp.where(ids < vocab, z, low)
        best, at = largest_of_parts(z.reshape(M, tiles.parts, tiles.width))
        named = jnp.broadcast_to(
            ids.reshape(1, tiles.parts, tiles.width), (M, tiles.parts, tiles.width)
        )
        best_ids = jnp.take_along_axis(named, at, axis=2)
        candidates = (
            constrain(a.reshape(M, -1), ("batch", None), layout) for a in (best, best_ids)
        )
        new, new_ids = likeliest(
            *(jnp.concatenate(two, 1) for two in zip((top, likely_ids), candidates, strict=True))
        )
        last = new[:, -1:]
        last_id = new_ids[:, -1:]
        for others, their_ids in ((top, likely_ids), (z, ids)):
            rest = add_exp(
                rest,
                jnp.where(
                    (others < last) | ((others == last) & (their_ids > last_id)), others, low
                ),
            )
        at_target = [
            each + tiles.at(z, column, tile)
            for each, column in zip(at_target, columns, strict=True)
        ]
        return new, new_ids, rest, *at_target

    columns = [] if targets_M is None else [targets_M[:, None]]
    start = (
        jnp.full((M, k), low),
        jnp.full((M, k), jnp.iinfo(jnp.int32).max),
        (jnp.full(M, low), jnp.zeros(M)),
        *[jnp.zeros((M, 1)) for _ in columns],
    )
    end = jax.lax.fori_loop(0, tiles.count, one, start)
    top, ids, (largest, total), *at_target = end
    rest = largest + jnp.log(jnp.where(largest > low, total, 0.0))
    normal = jnp.logaddexp(jax.nn.logsumexp(top, axis=1), rest)
    targets = [each[:, 0] - normal for each in at_target]
    return TopTokens(top - normal[:, None], ids, rest - normal, *targets)
