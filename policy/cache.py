"""What a token may look at. No cache: the tokens of its own call. A cache: what earlier calls left there as well.

A layer hands its new keys and values (or latents) to `extend` and gets back everything visible; it never asks for a mode.
Shapes: R repeats of a stack, S slots, K heads, C cache length, D head dimension, B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policy.config import Attention, DecoderConfig, GatedDeltaNet, LatentAttention, LayerSpec
from policy.layers.dropout import Dropout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Where the tokens of a call sit: position inside the document and segment (0: padding), both int32[B, T].

    The decoder fills in `tokens`, int32[B, T], and `rotations`, the (cos, sin) tables of all its rotary embeddings. `dropout` is
    for training only.
    """

    positions: jax.Array
    segments: jax.Array
    tokens: jax.Array | None = None
    rotations: dict[str, Any] | None = None
    dropout: Dropout | None = None

    def at(self, layer: jax.Array | int) -> Step:
        """The same for the layer of that number."""
        return replace(self, dropout=self.dropout.at(layer))


class Visible(NamedTuple):
    """What the queries of a call may look at: named arrays [B, K, C, D], and where each of the C entries sits."""

    arrays: dict[str, jax.Array]
    positions: jax.Array
    segments: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The entries of one layer: arrays [R, S, K, C, D] of which this layer owns [index]."""

    arrays: dict[str, jax.Array]
    index: jax.Array | int


def extend(cache: LayerCache | None, step: Step, **new: jax.Array) -> tuple[Visible, LayerCache | None]:
    """Adds `new` ([B, K, T, D] each, row b for slot b) at the step's positions; returns all that is visible.

    Padding is not written: its position is moved past the end and the scatter drops it. Entries past a query's own position
    may be left from an earlier owner of the slot; attention masks them, because their position is larger.
    """
    if cache is None:
        return Visible(new, step.positions, step.segments), None
    arrays, seen = {}, {}
    B, T = step.positions.shape
    rows = jnp.arange(B)[:, None]
    for name, value in new.items():
        array = cache.arrays[name]
        at = jnp.where(step.segments != 0, step.positions, array.shape[3] + jnp.arange(T))
        value = jnp.swapaxes(value, 1, 2).astype(array.dtype)
        arrays[name] = array.at[cache.index, rows, :, at].set(value, mode="drop", unique_indices=True)
        seen[name] = arrays[name][cache.index]
    length = next(iter(seen.values())).shape[2]
    positions = jnp.broadcast_to(jnp.arange(length), (B, length))
    return Visible(seen, positions, jnp.ones_like(positions)), replace(cache, arrays=arrays)


def take(cache: LayerCache, name: str, at_BTk: jax.Array) -> jax.Array:
    """[B, T, k, D]: the entries of an array with one head that stand at `at`, row b of slot b. They are read where they lie: to
    slice the layer out of a stacked array first would copy all of it. Slots are a batch dimension of the gather: with an index
    for them, a mesh that cuts the cache by slots would exchange it."""
    array = cache.arrays[name]
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(0, 2, 3),
        start_index_map=(0, 3),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(0,),
    )
    index = jnp.stack([jnp.broadcast_to(cache.index, at_BTk.shape), at_BTk], axis=-1)
    return jax.lax.gather(array, index, dims, (1, 1, 1, 1, array.shape[-1]), mode="promise_in_bounds")


# Logical axes of every cache array [R, S, K, C, D].
AXES = (None, "cache_batch", "cache_heads", None, None)


@dataclass(frozen=True)
class Entry:
    """One array of a layer, [heads, length, dim] a slot. `length` None is the length of the cache: one entry a token; a number is
    a state of fixed size, whatever the length. `dtype` None is that of the cache."""

    heads: int
    dim: int
    length: int | None = None
    dtype: str | None = None


def _entries(spec: LayerSpec) -> dict[str, Entry]:
    """What a layer keeps in the cache, by name."""
    match spec.mixer:
        case Attention(kv_heads=heads, head_dim=dim):
            return {"k": Entry(heads, dim), "v": Entry(heads, dim)}
        case LatentAttention(kv_lora_rank=rank, rope=rope, indexer=indexer):
            keys = {} if indexer is None else {"index": Entry(1, indexer.head_dim)}
            return {"latent": Entry(1, rank + rope.dim)} | keys
        case GatedDeltaNet(key_heads=K, value_heads=H, key_dim=D, value_dim=V, conv_width=width):
            return {"conv": Entry(1, 2 * K * D + H * V, width - 1), "state": Entry(H, V, D, "float32")}
        case None:
            return {}


def create(config: DecoderConfig, slots: int, length: int, dtype, *, scan: bool) -> tuple:
    """An empty cache of `slots` rows of `length` tokens: for each stack a tuple of parts, each a tuple over the pattern of
    named arrays. A scanned stack has one part with all its repeats, an unrolled one a part with one layer for each repeat
    (on CPU, reading a layer out of one stacked array costs a copy of it at every step)."""

    def zeros(entry, repeats):
        rows = length if entry.length is None else entry.length
        return jnp.zeros((repeats, slots, entry.heads, rows, entry.dim), entry.dtype or dtype)

    def part(stack, repeats):
        return tuple({name: zeros(entry, repeats) for name, entry in _entries(spec).items()} for spec in stack.pattern)

    return tuple(
        (part(stack, stack.repeats),) if scan else tuple(part(stack, 1) for _ in range(stack.repeats)) for stack in config.stacks
    )


def insert(cache: tuple, prefix: tuple, slots: jax.Array, rows: jax.Array) -> tuple:
    """Copies row rows[i] of `prefix` (a shorter cache) to slot slots[i] of `cache`; slots past the end, all different, are
    skipped. States of fixed size are as long in both, and so copied whole."""

    def copy(into, source):
        return into.at[:, slots, :, : source.shape[3]].set(source[:, rows], mode="drop", unique_indices=True)

    return jax.tree.map(copy, cache, prefix)


def bytes_per_token(config: DecoderConfig, dtype) -> int:
    """Bytes that one more token takes in the cache, over all layers; states of fixed size take none."""
    entries = [entry for spec in config.layers for entry in _entries(spec).values() if entry.length is None]
    return sum(entry.heads * entry.dim * jnp.dtype(entry.dtype or dtype).itemsize for entry in entries)
