"""Entries that stand for a block of tokens each (DeepSeek V4): transformers' DeepseekV4HCACompressor and, with an
overlap, DeepseekV4CSACompressor.

The blocks of a document count from its first token. Without a cache a call computes the entries of all blocks in its
rows. With one it stores what each token adds to an entry, and computes the entries of the blocks that its tokens
complete: `ceil(T / rate)` for each row, wherever its tokens begin.

B rows, T tokens, E hidden, D dimensions of an entry, W = D or with an overlap 2 D, n blocks, s tokens of an entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from policy.attention.dot_product_attention import MASKED
from policy.cache.blocks import Blocks
from policy.cache.layer_cache import LayerCache, Visible, extend, gather_entries
from policy.cache.pages import Pool
from policy.cache.step import Step
from policy.config import Compression, DecoderConfig, Norm, Rope
from policy.mesh.sharding import to_cache
from policy.ops.linear import einsum
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight, zeros
from policy.ops.rope import rotate, rotation


def turn(x_BHTD: jax.Array, rope: Rope, table: tuple[jax.Array, jax.Array], *, back: bool = False) -> jax.Array:
    """Rotates the last `rope.dim` of the last dimension of x, or undoes it; the rest passes through."""
    cos, sin = table
    kept, turned = jnp.split(x_BHTD, [x_BHTD.shape[-1] - rope.dim], axis=-1)
    return jnp.concatenate([kept, rotate(turned, rope, (cos, -sin if back else sin))], axis=-1)


class Compressor(nnx.Module):
    """Computes the entries of blocks, as `Compression` says. Weights: kv_proj, gate_proj [E, W], position_bias [rate,
    W], kv_norm [D]. With an overlap W holds [what a token adds to the next block's entry | to that of its own].

    Entries are summed in float32. The projections are never quantised: the gates are exponents.
    """

    def __init__(self, dim: int, spec: Compression, norm: Norm, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, W, init = config.hidden_size, dim * (1 + spec.overlap), normal(config.initializer_range)
        self.kv_proj = weight(rngs, (E, W), ("embed", "kv"), init)
        self.gate_proj = weight(rngs, (E, W), ("embed", "kv"), init)
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
        """Returns the entries [B, n, D] of the blocks whose last tokens have the positions `ends`, from the parts of the
        `span` tokens up to there. The first block has none before it."""
        rate, (B, n, s, _) = self.spec.rate, parts_BnsX.shape
        kv, gate = jnp.split(parts_BnsX.astype(jnp.float32), 2, axis=-1)
        kv, gate = kv.reshape(B, n, -1, rate, kv.shape[-1]), gate.reshape(B, n, -1, rate, gate.shape[-1])
        gate = gate + self.position_bias[...].astype(jnp.float32)
        if self.spec.overlap:
            kv, gate = (_halves(each) for each in (kv, gate))
            before = jnp.arange(2)[:, None, None] == 0
            gate = jnp.where(before & (ends_Bn < s - 1)[..., None, None, None], MASKED, gate)
        kv, gate = kv.reshape(B, n, s, -1), gate.reshape(B, n, s, -1)
        summed = jnp.sum(kv * jax.nn.softmax(gate, axis=2), axis=2)
        entries = self.kv_norm(summed.astype(parts_BnsX.dtype))
        table = rotation(rope, ends_Bn - (rate - 1))
        return turn(entries[:, None], rope, table)[:, 0]


def _halves(x_Bn2rW: jax.Array) -> jax.Array:
    """Returns the first half of W of the block before and the second half of the block itself: [B, n, 2, rate, D]."""
    first, second = jnp.split(x_Bn2rW, 2, axis=-1)
    return jnp.stack([first[:, :, 0], second[:, :, 1]], axis=2)


class OwnBlocks(NamedTuple):
    """The blocks that lie completely in the rows of a call without a cache, int32[B, n] each: the place in the row of
    their last tokens, its position, and its segment, 0 where a row has fewer than n blocks."""

    last: jax.Array
    ends: jax.Array
    segments: jax.Array

    @classmethod
    def of(cls, step: Step, rate: int) -> OwnBlocks:
        """Finds the blocks of all documents, in the order of the row."""
        B, T = step.positions.shape
        n = max(1, T // rate)
        is_end = (step.segments != 0) & (step.positions % rate == rate - 1)
        column = jnp.where(is_end, jnp.cumsum(is_end, axis=1) - 1, n)
        rows = jnp.arange(B)[:, None]
        last = jnp.zeros((B, n), jnp.int32).at[rows, column].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
        exists = jnp.arange(n) < jnp.sum(is_end, axis=1, keepdims=True)
        ends = jnp.take_along_axis(step.positions, last, axis=1)
        return cls(last, ends, jnp.where(exists, jnp.take_along_axis(step.segments, last, axis=1), 0))

    def gather(self, parts_BTX: jax.Array, span: int) -> jax.Array:
        """Returns the parts of the `span` tokens up to the last one of each block: [B, n, span, X]."""
        (B, n), X = self.last.shape, parts_BTX.shape[-1]
        places = jnp.maximum(self.last[..., None] - span + 1 + jnp.arange(span), 0).reshape(B, n * span, 1)
        return jnp.take_along_axis(parts_BTX, places, axis=1).reshape(B, n, span, X)


class CompletedBlocks(NamedTuple):
    """The blocks that the tokens of a call over a cache may complete: the position of their last tokens int32[B, n],
    whether the call has it bool[B, n], and the positions of the tokens of each, int32[B, n, span]."""

    ends: jax.Array
    complete: jax.Array
    tokens: jax.Array

    @classmethod
    def of(cls, step: Step, rate: int, span: int) -> CompletedBlocks:
        """Finds the blocks of rows whose tokens follow one another."""
        real, T = step.segments != 0, step.positions.shape[1]
        last = jnp.max(jnp.where(real, step.positions, -1), axis=1, keepdims=True)
        first = last - jnp.sum(real, axis=1, keepdims=True) + 1
        ends = (first // rate + 1 + jnp.arange(-(-T // rate))) * rate - 1
        tokens = ends[..., None] - span + 1 + jnp.arange(span)
        return cls(ends, (ends >= first) & (ends <= last), jnp.clip(tokens, 0, jnp.maximum(last, 0)[..., None]))


def compress(
    compressors: dict[str, tuple[Compressor, jax.Array]], step: Step, cache: LayerCache | None, rope: Rope, layout
) -> tuple[Visible, LayerCache | None]:
    """Returns (the entries that queries may see, by prefix of their names: [B, 1, C, D], with the positions of the last
    tokens of their blocks; the cache).

    compressors: by prefix, with the parts of the call's tokens [B, T, 2 W]. All have one rate.
    """
    spec = next(iter(compressors.values()))[0].spec
    if cache is None:
        own, arrays = OwnBlocks.of(step, spec.rate), {}
        for prefix, (compressor, parts) in compressors.items():
            entries = compressor.entries(own.gather(parts, compressor.span), own.ends, rope)
            arrays[prefix] = entries[:, None]
        return Visible(arrays, own.ends, own.segments), None
    span = next(iter(compressors.values()))[0].span
    completed = CompletedBlocks.of(step, spec.rate, span)
    new = {}
    for prefix, (compressor, parts) in compressors.items():
        name = f"{prefix}parts"
        _, cache = extend(cache, step, lookback=span, **{name: to_cache(parts[:, None], layout)})
        assert cache is not None
        gathered = gather_entries(cache, name, completed.tokens, parts.dtype)
        new[f"{prefix}entries"] = compressor.entries(gathered, completed.ends, rope)[:, None]
    array = cache.arrays[next(iter(new))]
    blocks = array.blocks if isinstance(array, Pool) else Blocks(spec.rate)
    assert blocks is not None
    places = replace(step, positions=blocks.places(completed.ends), segments=completed.complete.astype(jnp.int32))
    seen, cache = extend(cache, places, **new)
    ends, exists = (jnp.broadcast_to(a, seen.positions.shape) for a in blocks.ends(seen.positions.shape[1]))
    return Visible(
        {name.removesuffix("entries"): array for name, array in seen.arrays.items()}, ends, exists.astype(jnp.int32)
    ), cache
