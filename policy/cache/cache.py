"""What a token may look at. No cache: the tokens of its own call. A cache: what earlier calls left there as well.

A layer hands its new keys and values (or latents) to `extend` and gets back everything visible; it never asks for a mode.
Keys, values and latents may be kept quantised, as values of 8 or 4 bits beside their scales ("k" and "k.scale"); `extend` quantises
what it writes and gives back floats. Keys of an index selector and states of fixed size never are.

Some tokens of a call may be taken back: a drafted token that turns out wrong. Entries by position need nothing for that: those
past the tokens that stay are masked, for their position is larger than that of any query, and are overwritten. States of fixed
size have no positions. With `Runtime.tentative` a layer that has one leaves it in the cache as it was, and returns the states
after each token in `LayerAux.states`; `commit` then writes those after the tokens that stay.

Entries by position are contiguous, C for each slot, or lie in pools of pages (policy/cache/pages.py), which a table of the call names for
its rows. States of fixed size are kept by slot in both forms, and so are the rings of layers with a window (policy/cache/sliding_window.py).

Shapes: R repeats of a stack, S slots, K heads, C cache length, D head dimension, B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import qwix

from policy.cache import pages, sliding_window
from policy.cache.pages import Pages, Pool
from policy.cache.sliding_window import Ring, WithRings
from policy.cache.step import Step
from policy.config import Attention, DecoderConfig, Engram, GatedDeltaNet, LatentAttention, LayerSpec, StoredType
from policy.ops.quantization import TYPES, quantize_tiles

if TYPE_CHECKING:
    from policy.intermediates import Aux
    from policy.mesh.sharding import Layout


class Visible(NamedTuple):
    """What the queries of a call may look at: named arrays [B, K, C, D], and where each of the C entries sits."""

    arrays: dict[str, jax.Array]
    positions: jax.Array
    segments: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The entries of one layer: arrays [R, S, K, C, D] of which this layer owns [index]. In a paged cache entries by position are
    in pools, of which it owns pages [:, index]; `table` int32[B, M] are those of the rows of a call, and `layout` says how a mesh
    cuts them, with `anywhere` of the `Step`."""

    arrays: dict[str, jax.Array | Pool | Ring]
    index: jax.Array | int
    table: jax.Array | None = None
    layout: Layout | None = field(default=None, metadata={"static": True})
    anywhere: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(cls, arrays: dict, index: jax.Array | int, step: Step, layout: Layout | None) -> LayerCache:
        """That of one layer in a call."""
        return cls(arrays, index, step.pages, layout, step.anywhere)


def layout_of(cache: LayerCache | None, layout: Layout | None) -> Layout | None:
    """By which queries and new entries go to the rows of the cache. None: they stay where they are, and devices read the pages of
    all rows."""
    return None if cache is not None and cache.table is not None and cache.anywhere else layout


def extend(
    cache: LayerCache | None, step: Step, *, back: int | None = None, **new: jax.Array
) -> tuple[Visible, LayerCache | None]:
    """Adds `new` ([B, K, T, D] each, row b for slot b) at the step's positions; returns all that is visible, or of pages at least
    what queries see that look `back` so many tokens at most, themselves counted.

    Padding is not written: its position is moved past the end and the scatter drops it. Entries past a query's own position
    may be left from an earlier owner of the slot; attention masks them, because their position is larger.
    """
    if cache is None:
        return Visible(new, step.positions, step.segments), None
    arrays, seen = {}, {}
    B, T = step.positions.shape
    rows = jnp.arange(B)[:, None]
    # XLA makes a slice update of a scatter of one entry, which on CPU costs three copies of the array in every step of a loop. A
    # second entry, past the end, keeps it a scatter in place.
    more = B * T == 1 and isinstance(cache.index, int)
    looking, first = cache, 0
    if cache.table is not None and back is not None and isinstance(pool := cache.arrays[next(iter(new))], Pool):
        table, first = pages.looking_back(cache.table, step, back, pool.array.shape[3])
        looking = replace(cache, table=table)
    for name, value in new.items():
        for part, written in _parts(cache.arrays, name, value).items():
            array = cache.arrays[part]
            if isinstance(array, Pool | Ring):
                arrays[part] = _write(cache, array, step, written)
                continue
            at = jnp.where(step.segments != 0, step.positions, array.shape[3] + jnp.arange(T))
            written = jnp.swapaxes(written, 1, 2).astype(array.dtype)
            if more:
                at, written = (
                    jnp.pad(at, ((0, 0), (0, 1)), constant_values=array.shape[3] + 1),
                    jnp.repeat(written, 2, axis=1),
                )
            arrays[part] = array.at[cache.index, rows, :, at].set(written, mode="drop", unique_indices=True)
        seen[name] = read(arrays, name, partial(_all, looking), value.dtype)
    length, cache = next(iter(seen.values())).shape[2], replace(cache, arrays=cache.arrays | arrays)
    if isinstance(next(iter(arrays.values())), Ring):
        positions = sliding_window.positions(step, length)
        return Visible(seen, positions, (positions >= 0).astype(jnp.int32)), cache
    positions = first + jnp.broadcast_to(jnp.arange(length), (B, length))
    return Visible(seen, positions, jnp.ones_like(positions)), cache


def remember(cache: LayerCache | None, step: Step, routes_BTK: jax.Array | None) -> LayerCache | None:
    """The cache with the experts of the step's tokens, where it keeps them."""
    if cache is None or ROUTES not in cache.arrays:
        return cache
    return extend(cache, step, **{ROUTES: routes_BTK[:, None]})[1]


def _write(cache: LayerCache, array: Pool | Ring, step: Step, value_BKTD: jax.Array) -> Pool | Ring:
    if isinstance(array, Ring):
        return sliding_window.write(array, cache.index, step, value_BKTD)
    if cache.table is None:
        raise ValueError("a call over a paged cache needs the pages of its rows: Step.pages")
    return pages.write(array, cache.index, cache.table, step, value_BKTD, cache.layout)


def _all(cache: LayerCache, array: jax.Array | Pool | Ring) -> jax.Array:
    """[B, K, C, D]: the layer's part of one of its arrays, for every row of a call."""
    match array:
        case Pool():
            return pages.gather(array, cache.index, cache.table, cache.layout, cache.anywhere)
        case Ring():
            return array.array[cache.index]
    return array[cache.index]


def take(cache: LayerCache, name: str, at_BTk: jax.Array, dtype) -> jax.Array:
    """[B, T, k, D]: the entries of an array with one head that stand at `at`, row b of slot b, as `read` gives them. They are read
    where they lie: to slice the layer out of a stacked array first would copy all of it. Slots are a batch dimension of the
    gather: with an index for them, a mesh that cuts the cache by slots would exchange it."""
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(0, 2, 3),
        start_index_map=(0, 3),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(0,),
    )
    index = jnp.stack([jnp.broadcast_to(cache.index, at_BTk.shape), at_BTk], axis=-1)

    def pick(array):
        if cache.table is not None:
            return pages.pick(array, cache.index, at_BTk, cache.table, cache.layout, cache.anywhere)
        return jax.lax.gather(array, index, dims, (1, 1, 1, 1, array.shape[-1]), mode="promise_in_bounds")

    return read(cache.arrays, name, pick, dtype)


def _parts(arrays: dict[str, jax.Array | Pool | Ring], name: str, value: jax.Array) -> dict[str, jax.Array]:
    """`value` as the arrays that the cache keeps of it, by name: itself, or quantised values and scales."""
    if f"{name}.scale" not in arrays:
        return {name: value}
    values, scales = jax.tree.leaves((arrays[name], arrays[f"{name}.scale"]))
    quantized = quantize_tiles(value, values.dtype, scales.shape[-1])
    return {name: quantized.qvalue, f"{name}.scale": quantized.scale}


def read(arrays: dict[str, jax.Array | Pool | Ring], name: str, pick, dtype) -> jax.Array:
    """`pick(array)`, a part of the entries `name` with whole vectors [..., D], as floats where they are quantised."""
    if f"{name}.scale" not in arrays:
        return pick(arrays[name])
    return qwix.dequantize(qwix.QArray(pick(arrays[name]), pick(arrays[f"{name}.scale"]))).astype(dtype)


# The experts of each token, an entry by position of layers with a mixture of experts.
ROUTES = "routes"

# Logical axes of every cache array [R, S, K, C, D] that is no pool.
AXES = (None, "cache_batch", "cache_heads", None, None)


def _each(function, pool, *caches):
    """jax.tree.map of `function` over arrays by slot and of `pool` over pools."""

    def one(leaf, *others):
        return (pool if isinstance(leaf, Pool) else function)(leaf, *others)

    return jax.tree.map(one, *caches, is_leaf=lambda leaf: isinstance(leaf, Pool))


def constrained(cache, layout: Layout):
    """The cache where it belongs: left to itself the compiler may lay out a result otherwise than the cache that was given up for
    it, which is a copy now and another compilation at the next call."""

    def placed(axes, array):
        return jax.lax.with_sharding_constraint(array, layout.sharding(axes, array.shape))

    return by_axes(placed, cache)


def by_axes(function, cache):
    """The cache with `function(logical axes, array)` in the place of each array."""
    return _each(partial(function, AXES), lambda pool: jax.tree.map(partial(function, pages.AXES), pool), cache)


def rows_of(cache, slots_B: jax.Array):
    """The cache of a call whose row b is slot slots[b]: arrays by slot [R, B, K, C, D] of those slots, pools as they are. Slots
    past the end give some slot or other."""
    return _each(lambda array: array.at[:, slots_B].get(mode="clip"), lambda pool: pool, cache)


def with_rows(cache, rows, slots_B: jax.Array):
    """`cache` after a call over `rows`, which `rows_of` made of it: row b goes back to slot slots[b]; slots past the end, all
    different, are skipped. Pools are those of `rows`, if it has them."""

    def put(array, row):
        return array.at[:, slots_B].set(row, mode="drop", unique_indices=True)

    return _each(put, lambda before, after: before if after is None else after, cache, rows)


def without_pools(cache):
    """The arrays by slot alone, None in the place of each pool."""
    return _each(lambda array: array, lambda pool: None, cache)


def with_arrays(cache, arrays):
    """Returns `cache` with `arrays`, which `without_pools` made of it, in the place of its arrays by slot. Writes nothing."""
    return _each(lambda before, after: after, lambda pool, _: pool, cache, arrays)


def copy_pages(cache, source_n: jax.Array, to_n: jax.Array):
    """Pages source[i] written over pages to[i]: what a row does before it writes into a page that it shares. Numbers past the end,
    all different, are skipped."""
    return _each(lambda array: array, lambda pool: pages.copy(pool, source_n, to_n), cache)


@dataclass(frozen=True)
class Entry:
    """One array of a layer, [heads, length, dim] a slot. `length` None is the length of the cache: one entry a token; a number is
    a state of fixed size, whatever the length. `dtype` None is that of the cache. `tile`: where the cache is quantised, one
    scale for so many numbers of a token; None: never quantised. `window`: tokens that a query looks back at most, itself
    counted; None: any."""

    heads: int
    dim: int
    length: int | None = None
    dtype: str | None = None
    tile: int | None = None
    window: int | None = None

    @property
    def bits(self) -> int:
        """Of one number; `dtype` is known."""
        dtype = jnp.dtype(self.dtype)
        return 4 if dtype == jnp.int4 else 8 * dtype.itemsize


def _entries(spec: LayerSpec, config: DecoderConfig) -> dict[str, Entry]:
    """What a layer keeps in the cache, by name."""
    return _mixer_entries(spec) | _engram_entries(spec.engram, config)


def _engram_entries(engram: Engram | None, config: DecoderConfig) -> dict[str, Entry]:
    if engram is None:
        return {}
    G = 1 if config.hyper_connections is None else config.hyper_connections.streams
    ids = Entry(1, 1, len(engram.multipliers) - 1, "int32")
    return {"ngram_ids": ids, "ngram_conv": Entry(1, G * config.hidden_size, engram.history)}


def _mixer_entries(spec: LayerSpec) -> dict[str, Entry]:
    match spec.mixer:
        case Attention(kv_heads=heads, head_dim=dim, window=window, chunk=chunk):
            back = min((w for w in (window, chunk) if w), default=None)
            return {name: Entry(heads, dim, tile=dim, window=back) for name in "kv"}
        case LatentAttention(kv_lora_rank=rank, rope=rope, indexer=indexer):
            keys = {} if indexer is None else {"index": Entry(1, indexer.head_dim)}
            # No tile holds numbers of both the normed latent and the rotated key, which differ in size.
            return {"latent": Entry(1, rank + rope.dim, tile=math.gcd(rank, rope.dim))} | keys
        case GatedDeltaNet(key_heads=K, value_heads=H, key_dim=D, value_dim=V, conv_width=width):
            return {"conv": Entry(1, 2 * K * D + H * V, width - 1), "state": Entry(H, V, D, "float32")}
        case None:
            return {}


def _routes_entry(spec: LayerSpec) -> dict[str, Entry]:
    if spec.moe is None:
        return {}
    router = spec.moe.router
    return {ROUTES: Entry(1, router.experts_per_token, dtype="int8" if router.experts <= 128 else "int16")}


def _stored(
    spec: LayerSpec, config: DecoderConfig, dtype, quantization: StoredType | None, routes=False
) -> dict[str, Entry]:
    """The entries of a layer as arrays of known dtypes; quantised ones have their scales beside them. `routes`: with those of its
    experts."""
    found = _routes_entry(spec) if routes else {}
    for name, entry in _entries(spec, config).items():
        if quantization is None or entry.tile is None:
            found[name] = replace(entry, dtype=entry.dtype or jnp.dtype(dtype).name)
        else:
            found[name] = replace(entry, dtype=jnp.dtype(TYPES[quantization]).name)
            found[f"{name}.scale"] = Entry(entry.heads, entry.dim // entry.tile, dtype="float32", window=entry.window)
    return found


def create(
    config: DecoderConfig,
    slots: int,
    length: int | Pages | WithRings,
    dtype,
    *,
    scan: bool,
    quantization: StoredType | None = None,
    routes: bool = False,
) -> tuple:
    """An empty cache of `slots` rows of `length` tokens, or of pages for any rows beside `slots` states of fixed size, with or
    without rings: for each stack a tuple of parts, each a tuple over the pattern of named arrays. A scanned stack has one part with
    all its repeats, an unrolled one a part with one layer for each repeat (on CPU, reading a layer out of one stacked array costs a
    copy of it at every step). `quantization`: the type in which keys, values and latents are kept. `routes`: whether layers with
    experts keep which of them computed each token; the runtime then has to record them."""

    kind = length, dtype, quantization, routes

    def part(stack, repeats):
        return tuple(_empty(spec, config, (repeats, slots), kind) for spec in stack.pattern)

    return tuple(
        (part(stack, stack.repeats),) if scan else tuple(part(stack, 1) for _ in range(stack.repeats))
        for stack in config.stacks
    )


def _empty(
    spec: LayerSpec, config: DecoderConfig, first: tuple[int, int], kind: tuple
) -> dict[str, jax.Array | Pool | Ring]:
    """The arrays of a layer, [*first, K, C, D]; `kind` is (length of the cache or its pages, its dtype, its quantization), and
    whether routes are kept."""
    length, *how = kind
    length, room = length if isinstance(length, WithRings) else (length, None)

    def array(entry: Entry):
        if (
            entry.window is not None
            and room is not None
            and (isinstance(length, Pages) or length > entry.window + room)
        ):
            return Ring(jnp.zeros((*first, entry.heads, entry.window + room, entry.dim), entry.dtype))
        if entry.length is None and isinstance(length, Pages):
            return pages.empty(entry.heads, first[0], length, entry.dim, entry.dtype)
        return jnp.zeros(
            (*first, entry.heads, length if entry.length is None else entry.length, entry.dim), entry.dtype
        )

    return {name: array(entry) for name, entry in _stored(spec, config, *how).items()}


class Drafts(NamedTuple):
    """What drafting needs beside the decoder's cache: the cache of each prediction module's layer, arrays [1, S, K, C, D], and the
    decoder's states at the last W tokens that it has seen, `hidden` [1, S, 1, W, E]."""

    layers: tuple[dict[str, jax.Array], ...]
    hidden: jax.Array


def supports_truncation(spec: LayerSpec, config: DecoderConfig) -> bool:
    """Whether a layer may be fed the same positions again: it keeps entries by position only, no state of fixed size."""
    return all(entry.length is None for entry in _entries(spec, config).values())


def create_drafts(config: DecoderConfig, slots: int, kind: tuple, *, modules: int, window: int) -> Drafts:
    """Empty `Drafts` of the first `modules` prediction modules, with W = `window`; `kind` is (length of the cache, its dtype, its
    quantization)."""
    spec = config.multi_token_prediction.layer
    layers = tuple(_empty(spec, config, (1, slots), kind) for _ in range(modules))
    return Drafts(layers, jnp.zeros((1, slots, 1, window, config.hidden_size), kind[1]))


def commit(cache: tuple, aux: Aux, counts_S: jax.Array) -> tuple:
    """The cache after a tentative call, of which the first counts[s] tokens of slot s stay (0: none)."""

    def chosen(before_RSKCD, after_RSTKCD):
        index = jnp.maximum(counts_S - 1, 0)[None, :, None, None, None, None]
        after = jnp.take_along_axis(after_RSTKCD, index, axis=2)[:, :, 0].astype(before_RSKCD.dtype)
        return jnp.where((counts_S > 0)[None, :, None, None, None], after, before_RSKCD)

    def layer(arrays, states, r):
        """`r`: number of the part, which holds one repeat if there are several."""
        after = {name: a[r * len(arrays[name]) : (r + 1) * len(arrays[name])] for name, a in (states or {}).items()}
        return arrays | {name: chosen(arrays[name], a) for name, a in after.items()}

    return tuple(
        tuple(
            tuple(layer(arrays, aux.layers[f"stacks.{s}.layers.{i}"].states, r) for i, arrays in enumerate(part))
            for r, part in enumerate(parts)
        )
        for s, parts in enumerate(cache)
    )


def insert(cache: tuple, prefix: tuple, slots: jax.Array, step: Step | None = None) -> tuple:
    """Copies row b of `prefix`, a contiguous cache of the T tokens of a step from position 0 on, to slot slots[b] of `cache`; slots
    past the end, all different, are skipped. States of fixed size are as long in both, and so copied whole. Rings must have room
    for T tokens; pools take the entries that are not padding to the step's pages."""

    def copy(into, source):
        return into.at[:, slots, :, : source.shape[3]].set(source, mode="drop", unique_indices=True)

    def one(into, source):
        match into:
            case Pool():
                return pages.insert(into, step.pages, step, source)
            case Ring():
                return Ring(copy(into.array, source))
        return copy(into, source)

    return jax.tree.map(one, cache, prefix, is_leaf=lambda leaf: isinstance(leaf, Pool | Ring))


def routes(cache: tuple, row: jax.Array, pages_M: jax.Array | None = None) -> dict[str, jax.Array]:
    """int[C, R, k] by path of the layer: the experts of the entries of a row, which over a paged cache has these pages."""

    def of(array):
        if not isinstance(array, Pool):
            return jnp.swapaxes(array[:, row, 0], 0, 1)
        found_MRPk = array.array.at[0, :, pages_M].get(mode="promise_in_bounds")[..., : array.dim]
        return jnp.swapaxes(found_MRPk, 1, 2).reshape(-1, found_MRPk.shape[1], array.dim)

    return {
        f"stacks.{s}.layers.{i}": jnp.concatenate([of(part[i][ROUTES]) for part in parts], axis=1)
        for s, parts in enumerate(cache)
        for i, arrays in enumerate(parts[0])
        if ROUTES in arrays
    }


def bytes_per_token(config: DecoderConfig, dtype, quantization: StoredType | None = None) -> int:
    """Bytes that one more token takes in the cache, over all layers, scales included; states of fixed size take none."""
    return sum(e.heads * e.dim * e.bits for e in _all_stored(config, dtype, quantization) if e.length is None) // 8


def bytes_per_page(config: DecoderConfig, size: int, dtype, quantization: StoredType | None = None) -> int:
    """Bytes of a page of `size` tokens, over all layers, with what fills up its entries."""
    stored = (e for e in _all_stored(config, dtype, quantization) if e.length is None)
    return size * sum(e.heads * pages.filled(e.dim) * e.bits for e in stored) // 8


def bytes_per_slot(config: DecoderConfig, dtype) -> int:
    """Bytes of the states of fixed size of one slot, over all layers."""
    return (
        sum(e.heads * e.length * e.dim * e.bits for e in _all_stored(config, dtype, None) if e.length is not None) // 8
    )


def _all_stored(config: DecoderConfig, dtype, quantization: StoredType | None) -> list[Entry]:
    return [entry for spec in config.layers for entry in _stored(spec, config, dtype, quantization).values()]
