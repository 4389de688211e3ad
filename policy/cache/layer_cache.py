"""The entries that one layer reads and writes in a call.

A layer hands its new keys and values (or latents) to `extend` and gets back everything visible; it
never asks for a mode. Without a cache the tokens of the call itself are visible. With a cache, the
entries of earlier calls are visible as well.

Keys, values and latents may be stored quantised, as values of 8 or 4 bits and their scales ("k" and
"k.scale"): `extend` quantises what it writes and returns floats. Keys of an index selector and
states of fixed size are never quantised.

Shapes: R repeats of a stack, S slots, K heads, C cache length, D head dimension, B rows, T tokens,
M pages of a row, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import qwix
from jax.typing import DTypeLike

from policy.cache import pages, sliding_window
from policy.cache.entries import ROUTES
from policy.cache.pages import Pool
from policy.cache.sliding_window import WindowEntries
from policy.cache.step import Step
from policy.cache.transposed_keys import TransposedKeys
from policy.intermediates import LayerAux
from policy.mesh.sharding import Layout
from policy.ops.quantization import quantize_tiles

# One array of a cache: contiguous [R, S, K, C, D], a pool of pages, a sliding window, or contiguous
# keys that are transposed.
CacheArray = jax.Array | Pool | WindowEntries | TransposedKeys


class Visible(NamedTuple):
    """Everything the queries of a call may look at: named arrays [B, K, C, D]; positions, segments
    and, in trees, `Tree.last`, int32[B, C]. has_transposed_keys: whether the keys lie in memory as
    `TransposedKeys`."""

    arrays: dict[str, jax.Array]
    positions: jax.Array
    segments: jax.Array
    last: jax.Array | None = None
    has_transposed_keys: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The entries of one layer in a call.

    arrays: arrays [R, S, K, C, D] by name, or TransposedKeys; this layer owns [index]. In a paged
        cache entries by position are in pools, and this layer owns pages [:, index].
    table: int32[B, M], the pages of the rows of the call, for a paged cache.
    layout: how a mesh shards rows and pages.
    anywhere: `Step.anywhere` of the call.
    """

    arrays: dict[str, CacheArray]
    index: jax.Array | int
    table: jax.Array | None = None
    layout: Layout | None = field(default=None, metadata={"static": True})
    anywhere: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        arrays: dict[str, CacheArray],
        index: jax.Array | int,
        step: Step,
        layout: Layout | None,
    ) -> LayerCache:
        """Makes the cache of layer `index` for a call over the tokens of `step`, which may not be
        those of trees."""
        if step.tree is not None:
            raise ValueError(
                "a cache holds no trees: sequences share beginnings in training and scoring only"
            )
        return cls(arrays, index, step.pages, layout, step.anywhere)


class LayerOutput(NamedTuple):
    """What a layer computes, or a part of one: `hidden` is the residual stream after the layer, or
    what the part adds to it, [B, T, E] (with several streams [B, T, streams, E]); `cache` holds the
    entries of these tokens, None without one; `aux` are the values that the layer reports."""

    hidden: jax.Array
    cache: LayerCache | None
    aux: LayerAux


def own_tokens(step: Step, arrays: dict[str, jax.Array]) -> Visible:
    """Returns what the queries of a call without a cache may look at: `arrays` of its own
    tokens."""
    return Visible(
        arrays, step.positions, step.segments, None if step.tree is None else step.tree.last
    )


def row_layout(cache: LayerCache | None, layout: Layout | None) -> Layout | None:
    """Returns the layout that routes queries and new entries to cache rows.

    None: queries and entries stay on their devices, and devices read the pages of all rows.
    """
    return None if cache is not None and cache.table is not None and cache.anywhere else layout


def extend(
    cache: LayerCache | None, step: Step, *, lookback: int | None = None, **new: jax.Array
) -> tuple[Visible, LayerCache | None]:
    """Adds `new` ([B, K, T, D] each, row b for slot b) at the step's positions. Returns everything
    visible and the cache.

    lookback: how many tokens a query looks back at most, itself included. Only the pages that such
    queries see are then read.

    Padding is not written: its position is moved past the end and the scatter drops it. Entries
    past a query's own position may be left over from an earlier request in the slot; attention
    masks them, because their position is larger.
    """
    if cache is None:
        return own_tokens(step, new), None
    arrays: dict[str, CacheArray] = {}
    entries: dict[str, jax.Array] = {}
    B, T = step.positions.shape
    rows = jnp.arange(B)[:, None]
    # XLA makes a slice update of a scatter of one entry, which on CPU costs three copies of the
    # array in every step of a loop. A second entry, past the end, keeps it a scatter in place.
    pad_index = B * T == 1 and isinstance(cache.index, int)
    read_cache, first_position = _narrowed(cache, step, lookback, next(iter(new)))
    for name, value in new.items():
        for stored_name, written in _stored_form(cache.arrays, name, value).items():
            array = cache.arrays[stored_name]
            if isinstance(array, Pool | WindowEntries):
                arrays[stored_name] = _write(cache, array, step, written)
                continue
            places = array.places if isinstance(array, TransposedKeys) else array.shape[3]
            positions = jnp.where(step.segments != 0, step.positions, places + jnp.arange(T))
            written = jnp.swapaxes(written, 1, 2)
            if pad_index:
                positions = jnp.pad(positions, ((0, 0), (0, 1)), constant_values=places + 1)
                written = jnp.repeat(written, 2, axis=1)
            if isinstance(array, TransposedKeys):
                arrays[stored_name] = array.write(cache.index, rows, positions, written)
                continue
            arrays[stored_name] = array.at[cache.index, rows, :, positions].set(
                written.astype(array.dtype), mode="drop", unique_indices=True
            )
        entries[name] = read(arrays, name, partial(_all_entries, read_cache), value.dtype)
    return _with_positions(entries, arrays, step, first_position), replace(
        cache, arrays=cache.arrays | arrays
    )


def visible(
    cache: LayerCache | None, step: Step, *, lookback: int | None = None, **new: jax.Array
) -> Visible:
    """Returns everything visible to a layer that reads the cache of another layer, which holds
    `new` already; without a cache `new` itself. `lookback` as in `extend`."""
    if cache is None:
        return own_tokens(step, new)
    read_cache, first_position = _narrowed(cache, step, lookback, next(iter(new)))
    pick = partial(_all_entries, read_cache)
    entries = {name: read(cache.arrays, name, pick, value.dtype) for name, value in new.items()}
    return _with_positions(
        entries, {name: cache.arrays[name] for name in new}, step, first_position
    )


def _narrowed(
    cache: LayerCache, step: Step, lookback: int | None, name: str
) -> tuple[LayerCache, jax.Array | int]:
    """Returns (the cache with the pages alone that queries see, the position of their first
    entry)."""
    if cache.table is None or lookback is None or not isinstance(pool := cache.arrays[name], Pool):
        return cache, 0
    table, first_position = pages.visible_table(cache.table, step, lookback, pool.array.shape[3])
    return replace(cache, table=table), first_position


def _with_positions(
    entries: dict[str, jax.Array],
    arrays: dict[str, CacheArray],
    step: Step,
    first_position: jax.Array | int,
) -> Visible:
    """Adds positions and segments to the entries that were read from `arrays`."""
    B = step.positions.shape[0]
    length = next(iter(entries.values())).shape[2]
    if isinstance(next(iter(arrays.values())), WindowEntries):
        positions = sliding_window.positions(step, length)
        return Visible(entries, positions, (positions >= 0).astype(jnp.int32))
    positions = first_position + jnp.broadcast_to(jnp.arange(length), (B, length))
    is_transposed = any(isinstance(array, TransposedKeys) for array in arrays.values())
    return Visible(entries, positions, jnp.ones_like(positions), has_transposed_keys=is_transposed)


def write_routes(
    cache: LayerCache | None, step: Step, routes_BTK: jax.Array | None
) -> LayerCache | None:
    """Writes the experts of the step's tokens, if the cache stores them. Returns the cache."""
    if cache is None or ROUTES not in cache.arrays:
        return cache
    assert routes_BTK is not None, "a cache that stores routes needs a runtime that records them"
    return extend(cache, step, lookback=None, **{ROUTES: routes_BTK[:, None]})[1]


def gather_entries(cache: LayerCache, name: str, at_BTk: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Reads the entries of all heads at positions `at`, row b of slot b: [B, K, T, k, D]. In a
    sliding window they are those of the last tokens.

    The entries are read in place: slicing the layer out of a stacked array first would copy all of
    it. Slots are a batch dimension of the gather: with an index for them, a mesh that shards the
    cache by slots would exchange it.
    """
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 4),
        collapsed_slice_dims=(0, 3),
        start_index_map=(0, 3),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(0,),
    )

    def pick(array):
        if isinstance(array, Pool):
            assert cache.table is not None, "a pool is read by the table of the call"
            return pages.pick(array, cache.index, at_BTk, cache.table, cache.layout, cache.anywhere)
        at = at_BTk
        assert not isinstance(array, TransposedKeys), "chosen entries are not stored transposed"
        if isinstance(array, WindowEntries):
            array, at = array.array, at_BTk % array.array.shape[3]
        index = jnp.stack([jnp.broadcast_to(cache.index, at.shape), at], axis=-1)
        sizes = (1, 1, array.shape[2], 1, array.shape[-1])
        return jax.lax.gather(array, index, dims, sizes, mode="promise_in_bounds")

    return read(cache.arrays, name, pick, dtype)


def read(
    arrays: dict[str, CacheArray],
    name: str,
    pick: Callable[[CacheArray], jax.Array],
    dtype: DTypeLike,
) -> jax.Array:
    """Returns `pick(array)` for the entries `name`, dequantised to `dtype` if they are stored
    quantised.

    `pick` returns a part of the array that holds full vectors [..., D].
    """
    if f"{name}.scale" not in arrays:
        return pick(arrays[name])
    return qwix.dequantize(qwix.QArray(pick(arrays[name]), pick(arrays[f"{name}.scale"]))).astype(
        dtype
    )


def _write(
    cache: LayerCache, array: Pool | WindowEntries, step: Step, value_BKTD: jax.Array
) -> Pool | WindowEntries:
    if isinstance(array, WindowEntries):
        return sliding_window.write(array, cache.index, step, value_BKTD)
    if cache.table is None:
        raise ValueError("a call over a paged cache needs the pages of its rows: Step.pages")
    return pages.write(array, cache.index, cache.table, step, value_BKTD, cache.layout)


def _all_entries(cache: LayerCache, array: CacheArray) -> jax.Array:
    """Returns all entries of one array of the layer, for every row of a call: [B, K, C, D]."""
    match array:
        case Pool():
            assert cache.table is not None, "a pool is read by the table of the call"
            return pages.gather(array, cache.index, cache.table, cache.layout, cache.anywhere)
        case WindowEntries():
            return array.array[cache.index]
        case TransposedKeys():
            return array.read(cache.index)
    return cast(jax.Array, array)[cache.index]


def _stored_form(
    arrays: dict[str, CacheArray], name: str, value: jax.Array
) -> dict[str, jax.Array]:
    """Returns the arrays that the cache stores for `value`, by name: itself, or quantised values
    and scales."""
    if f"{name}.scale" not in arrays:
        return {name: value}
    values, scales = jax.tree.leaves((arrays[name], arrays[f"{name}.scale"]))
    quantized = quantize_tiles(value, values.dtype, scales.shape[-1])
    return {name: quantized.qvalue, f"{name}.scale": quantized.scale}
