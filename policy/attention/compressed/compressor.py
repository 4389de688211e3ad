"""Entries that stand for a block of tokens each (DeepSeek V4): transformers'
DeepseekV4HCACompressor and, with an overlap, DeepseekV4CSACompressor.

The blocks of a document, or of a path of a tree, count from its first token. Without a cache a call
computes the entries of all blocks in its rows. With one it stores what each token adds to an entry,
and computes the entries of the blocks that its tokens complete: `ceil(T / rate)` for each row,
wherever its tokens begin.

B rows, T tokens, E hidden, H heads, D dimensions of an entry, W = D or with an overlap 2 D, X = 2 W
(values and gates), n blocks, s or S tokens of an entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from policy.attention.dot_product_attention import MASKED, in_chunks, of_chunks
from policy.cache.blocks import BlockEntries
from policy.cache.layer_cache import LayerCache, Visible, extend, gather_entries
from policy.cache.pages import Pool
from policy.cache.paths import Tree
from policy.cache.step import Step
from policy.config import Compression, DecoderConfig, Norm, Rope
from policy.mesh.sharding import Layout, to_cache
from policy.ops.linear import einsum
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight, zeros
from policy.ops.rope import rotate, rotation


def turn(
    x_BHTD: jax.Array, rope: Rope, table: tuple[jax.Array, jax.Array], *, back: bool = False
) -> jax.Array:
    """Rotates the last `rope.dim` of the last dimension of x, or undoes it; the rest passes
    through."""
    cos, sin = table
    kept, turned = jnp.split(x_BHTD, [x_BHTD.shape[-1] - rope.dim], axis=-1)
    return jnp.concatenate([kept, rotate(turned, rope, (cos, -sin if back else sin))], axis=-1)


class Compressor(nnx.Module):
    """Computes the entries of blocks, as `Compression` says. Weights: kv_proj, gate_proj [E, W],
    position_bias [rate, W], kv_norm [D]. With an overlap W holds [what a token adds to the next
    block's entry | to that of its own].

    Entries are summed in float32. The projections are never quantised: the gates are exponents.
    """

    def __init__(
        self, dim: int, spec: Compression, norm: Norm, config: DecoderConfig, rngs: nnx.Rngs
    ):
        self.spec = spec
        E = config.hidden_size
        W = dim * (1 + spec.overlap)
        init = normal(config.initializer_range)
        self.kv_proj = weight(rngs, (E, W), ("embed", "kv"), init, inputs=(0,), quantizable=False)
        self.gate_proj = weight(rngs, (E, W), ("embed", "kv"), init, inputs=(0,), quantizable=False)
        self.position_bias = weight(rngs, (spec.rate, W), (None, "kv"), zeros)
        self.kv_norm = RMSNorm(dim, norm, rngs)

    @property
    def span(self) -> int:
        """Returns the tokens of an entry."""
        return self.spec.rate * (1 + self.spec.overlap)

    def parts(self, x_BTE: jax.Array, layout=None) -> jax.Array:
        """Returns what each token adds to entries: [B, T, 2 W], vectors and gates."""
        products = [
            einsum("bte,ew->btw", x_BTE, each[...].astype(x_BTE.dtype), layout)
            for each in (self.kv_proj, self.gate_proj)
        ]
        return jnp.concatenate(products, axis=-1)

    def entries(self, parts_BnsX: jax.Array, ends_Bn: jax.Array, rope: Rope) -> jax.Array:
        """Returns the entries [B, n, D] of the blocks whose last tokens have the positions `ends`,
        from the parts of the `span` tokens up to there. The first block has none before it."""
        rate, (B, n, s, _) = self.spec.rate, parts_BnsX.shape
        kv, gate = jnp.split(parts_BnsX.astype(jnp.float32), 2, axis=-1)
        kv = kv.reshape(B, n, -1, rate, kv.shape[-1])
        gate = gate.reshape(B, n, -1, rate, gate.shape[-1])
        gate = gate + self.position_bias[...].astype(jnp.float32)
        if self.spec.overlap:
            kv, gate = (_halves(each) for each in (kv, gate))
            before = jnp.arange(2)[:, None, None] == 0
            gate = jnp.where(before & (ends_Bn < s - 1)[..., None, None, None], MASKED, gate)
        kv = kv.reshape(B, n, s, -1)
        gate = gate.reshape(B, n, s, -1)
        summed = jnp.sum(kv * jax.nn.softmax(gate, axis=2), axis=2)
        entries = self.kv_norm(summed.astype(parts_BnsX.dtype))
        table = rotation(rope, ends_Bn - (rate - 1))
        return turn(entries[:, None], rope, table)[:, 0]


def _halves(x_Bn2rW: jax.Array) -> jax.Array:
    """Returns the first half of W of the block before and the second half of the block itself: [B,
    n, 2, rate, D]."""
    first, second = jnp.split(x_Bn2rW, 2, axis=-1)
    return jnp.stack([first[:, :, 0], second[:, :, 1]], axis=2)


class OwnBlocks(NamedTuple):
    """The blocks that lie completely in the rows of a call without a cache: the places in the row
    of their tokens int32[B, n, span], of which those of the block before the first count nothing,
    and int32[B, n] each the position of their last tokens, its segment, 0 where a row has fewer
    than n blocks, and in trees `Tree.last` of it.

    A row of documents has at most T / rate. In trees every branch may complete a block of its own:
    n = T.
    """

    tokens: jax.Array
    ends: jax.Array
    segments: jax.Array
    last: jax.Array | None

    @classmethod
    def of(cls, step: Step, rate: int, span: int) -> OwnBlocks:
        """Finds the blocks of all documents or paths, in the order of the row."""
        (B, T), tree = step.positions.shape, step.tree
        n = max(1, T // rate) if tree is None else T
        is_end = (step.segments != 0) & (step.positions % rate == rate - 1)
        column = jnp.where(is_end, jnp.cumsum(is_end, axis=1) - 1, n)
        none = jnp.zeros((B, n), jnp.int32)
        ends = none.at[jnp.arange(B)[:, None], column].set(
            jnp.arange(T, dtype=jnp.int32), mode="drop"
        )
        exists = jnp.arange(n) < jnp.sum(is_end, axis=1, keepdims=True)

        def at_ends(x_BT):
            return jnp.where(exists, jnp.take_along_axis(x_BT, ends, axis=1), 0)

        if tree is None:
            tokens = jnp.maximum(ends[..., None] - span + 1 + jnp.arange(span), 0)
        else:
            tokens = _places_on_paths(ends, tree, span)
        last = None if tree is None else at_ends(tree.last)
        return cls(tokens, at_ends(step.positions), at_ends(step.segments), last)

    def entries(self, compressor: Compressor, parts_BTX: jax.Array, rope: Rope) -> jax.Array:
        """Returns the entries [B, n, D] from the parts of the call's tokens. Those of trees are
        computed in as many pieces as a block has tokens, and again in the backward pass, so that
        they take no more memory."""

        def some(arrays):
            tokens_BnS, ends_Bn = arrays
            B, n, S = tokens_BnS.shape
            of_blocks = jnp.take_along_axis(parts_BTX, tokens_BnS.reshape(B, n * S, 1), axis=1)
            return compressor.entries(of_blocks.reshape(B, n, S, -1), ends_Bn, rope)

        n = self.ends.shape[1]
        if self.last is None:
            return some((self.tokens, self.ends))
        chunk = max(1, n // compressor.spec.rate)
        pieces = tuple(in_chunks(a, chunk, 1) for a in (self.tokens, self.ends))
        return of_chunks(jax.lax.map(jax.checkpoint(some), pieces), 1)[:, :n]


def _places_on_paths(ends_Bn: jax.Array, tree: Tree, span: int) -> jax.Array:
    """Returns the places of the `span` tokens up to `ends` on their paths, int32[B, n, span]; 0
    before the first."""

    def earlier(places_Bn, _):
        return jnp.maximum(jnp.take_along_axis(tree.before, places_Bn, axis=1), 0), places_Bn

    _, places = jax.lax.scan(earlier, ends_Bn, length=span)
    return jnp.moveaxis(places[::-1], 0, -1)


class CompletedBlocks(NamedTuple):
    """The blocks that the tokens of a call over a cache may complete: the position of their last
    tokens int32[B, n], whether the call has it bool[B, n], and the positions of the tokens of each,
    int32[B, n, span]."""

    ends: jax.Array
    complete: jax.Array
    tokens: jax.Array

    @classmethod
    def of(cls, step: Step, rate: int, span: int) -> CompletedBlocks:
        """Finds the blocks of rows whose tokens follow one another."""
        real = step.segments != 0
        T = step.positions.shape[1]
        last = jnp.max(jnp.where(real, step.positions, -1), axis=1, keepdims=True)
        first = last - jnp.sum(real, axis=1, keepdims=True) + 1
        ends = (first // rate + 1 + jnp.arange(-(-T // rate))) * rate - 1
        tokens = ends[..., None] - span + 1 + jnp.arange(span)
        return cls(
            ends,
            (ends >= first) & (ends <= last),
            jnp.clip(tokens, 0, jnp.maximum(last, 0)[..., None]),
        )


def compress(
    compressors: dict[str, tuple[Compressor, jax.Array]],
    step: Step,
    cache: LayerCache | None,
    rope: Rope,
    layout: Layout | None,
) -> tuple[Visible, LayerCache | None]:
    """Returns (the entries that queries may see, by prefix of their names: [B, 1, C, D], with the
    positions of the last tokens of their blocks; the cache).

    compressors: by prefix, with the parts of the call's tokens [B, T, 2 W]. All have one rate.
    """
    first = next(iter(compressors.values()))[0]
    spec = first.spec
    span = first.span
    if cache is None:
        own = OwnBlocks.of(step, spec.rate, span)
        arrays = {
            name: own.entries(*of_tokens, rope)[:, None] for name, of_tokens in compressors.items()
        }
        return Visible(arrays, own.ends, own.segments, own.last), None
    completed = CompletedBlocks.of(step, spec.rate, span)
    new = {}
    for prefix, (compressor, parts) in compressors.items():
        name = f"{prefix}parts"
        _, cache = extend(cache, step, lookback=span, **{name: to_cache(parts[:, None], layout)})
        assert cache is not None
        of_blocks = gather_entries(cache, name, completed.tokens, parts.dtype)[:, 0]
        new[f"{prefix}entries"] = compressor.entries(of_blocks, completed.ends, rope)[:, None]
    array = cache.arrays[next(iter(new))]
    blocks = array.blocks if isinstance(array, Pool) else BlockEntries(spec.rate)
    assert blocks is not None
    places = replace(
        step, positions=blocks.places(completed.ends), segments=completed.complete.astype(jnp.int32)
    )
    seen, cache = extend(cache, places, **new)
    ends, exists = (
        jnp.broadcast_to(a, seen.positions.shape) for a in blocks.ends(seen.positions.shape[1])
    )
    return Visible(
        {name.removesuffix("entries"): array for name, array in seen.arrays.items()},
        ends,
        exists.astype(jnp.int32),
    ), cache
