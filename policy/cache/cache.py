"""The cache of a decoder. It creates, copies and measures the entries of all layers as one tree.

An entry by position belongs to one token. These entries are contiguous, C for each slot, or lie in
pools of pages (policy/cache/pages.py); then each call gets a page table of its rows. Both forms
store states of fixed size (recurrent layers) and sliding windows (policy/cache/sliding_window.py)
by slot. policy/cache/layer_cache.py reads and writes the entries of one layer.

The cache of a stack is a tuple of parts. A scanned stack has one part with the entries of all its
repeats; an unrolled stack has one part per repeat.

A call may write tokens that are rejected later: drafted tokens of speculative decoding. An entry by
position needs no undo: its position is larger than that of any query, so it is masked, and the next
token overwrites it. A state of fixed size has no position. With `Runtime.tentative` a layer leaves
its state in the cache unchanged and returns the states after each token in `LayerAux.states`.
`commit` then writes the state after the last accepted token.

Shapes: R repeats of a stack, S slots, K heads, C cache length, D head dimension, B rows, T tokens,
M pages of a row, P tokens of a page, E hidden, W tokens whose states drafting keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.cache import pages
from policy.cache.entries import ROUTES, Entry, entries, stored_entries
from policy.cache.layer_cache import CacheArray
from policy.cache.pages import Pages, Pool
from policy.cache.sliding_window import WindowEntries, WithSlidingWindows
from policy.cache.step import Step
from policy.cache.transposed_keys import TransposedKeys
from policy.config import DecoderConfig, LayerSpec, StoredType
from policy.intermediates import Aux
from policy.mesh.sharding import Layout

# Logical axes of every cache array [R, S, K, C, D], or [R, S, K, D, C], that is no pool.
AXES = (None, "cache_batch", "cache_heads", None, None)
# The parts of a cache: tuples and dicts of arrays and pools. Functions keep their structure.
CacheT = TypeVar("CacheT")


def _map_arrays(by_slot: Callable, by_page: Callable, *caches: Any) -> Any:
    """Maps `by_slot` over arrays by slot and `by_page` over pools."""

    def map_leaf(leaf, *others):
        return (by_page if isinstance(leaf, Pool) else by_slot)(leaf, *others)

    return jax.tree.map(map_leaf, *caches, is_leaf=lambda leaf: isinstance(leaf, Pool))


def constrained(cache: CacheT, layout: Layout) -> CacheT:
    """Constrains each array to its sharding.

    Otherwise the compiler may give the result another sharding than the donated cache has. This
    costs a copy now and a recompilation at the next call.
    """

    def constrain(axes, array):
        return jax.lax.with_sharding_constraint(array, layout.sharding(axes, array.shape))

    return by_axes(constrain, cache)


def by_axes(function: Callable, cache: CacheT) -> CacheT:
    """Replaces each array by `function(logical axes, array)`."""
    return _map_arrays(
        partial(function, AXES),
        lambda pool: jax.tree.map(partial(function, pages.AXES), pool),
        cache,
    )


def rows_of(cache: CacheT, slots_B: jax.Array) -> CacheT:
    """Returns the cache of a call whose row b is slot slots[b]: arrays by slot [R, B, K, C, D],
    pools unchanged.

    A slot past the end gives the entries of some other slot.
    """
    return _map_arrays(
        lambda array: array.at[:, slots_B].get(mode="clip"), lambda pool: pool, cache
    )


def with_rows(cache: CacheT, rows: CacheT, slots_B: jax.Array) -> CacheT:
    """Returns `cache` after a call over `rows`, which `rows_of` made: row b goes back to slot
    slots[b].

    Slots past the end, all different, are skipped. Pools are taken from `rows` if it has them.
    """

    def put(array, row):
        return array.at[:, slots_B].set(row, mode="drop", unique_indices=True)

    return _map_arrays(put, lambda before, after: before if after is None else after, cache, rows)


def without_pools(cache: CacheT) -> CacheT:
    """Returns the arrays by slot, with None instead of each pool."""
    return _map_arrays(lambda array: array, lambda pool: None, cache)


def with_arrays(cache: CacheT, arrays: CacheT) -> CacheT:
    """Returns `cache` with its arrays by slot replaced by `arrays`, a result of `without_pools`.
    Writes nothing."""
    return _map_arrays(lambda before, after: after, lambda pool, _: pool, cache, arrays)


def copy_pages(cache: CacheT, source_n: jax.Array, target_n: jax.Array) -> CacheT:
    """Copies page source[i] over page target[i], as a row needs before it writes into a page that
    it shares.

    Numbers past the end, all different, are skipped.
    """
    return _map_arrays(
        lambda array: array, lambda pool: pages.copy(pool, source_n, target_n), cache
    )


def create(
    config: DecoderConfig,
    slots: int,
    length: int | Pages | WithSlidingWindows,
    dtype: DTypeLike,
    *,
    scan: bool,
    quantization: StoredType | None = None,
    routes: bool = False,
    transposes_keys: bool = False,
) -> tuple:
    """Makes an empty cache: for each stack a tuple of parts, each a tuple over the pattern of named
    arrays.

    slots: number of rows with contiguous entries, or with states of fixed size where entries lie in
    pages.
    scan: a scanned stack has one part with all its repeats. An unrolled stack has one part per
    repeat, because reading
        a layer out of one stacked array copies it at every step on CPU.
    quantization: the type in which keys, values and latents are stored.
    routes: whether layers with experts store which experts computed each token; the runtime then
    has to record them.
    transposes_keys: whether contiguous keys are stored as `TransposedKeys`; then there may be no
    pages, sliding windows or `quantization`.
    """

    storage = length, dtype, quantization, routes

    def part(stack, repeats):
        return tuple(
            _empty(spec, config, (repeats, slots), storage, transposes_keys)
            for spec in stack.pattern
        )

    return tuple(
        (part(stack, stack.repeats),)
        if scan
        else tuple(part(stack, 1) for _ in range(stack.repeats))
        for stack in config.stacks
    )


def _empty(
    spec: LayerSpec,
    config: DecoderConfig,
    leading: tuple[int, int],
    storage: tuple,
    transposes_keys: bool = False,
) -> dict[str, CacheArray]:
    """Makes the arrays of a layer, [*leading, K, C, D]. `storage`: (length or pages, dtype,
    quantization[, routes])."""
    length, *options = storage
    length, call_tokens = length if isinstance(length, WithSlidingWindows) else (length, None)

    def array(entry: Entry) -> CacheArray:
        if call_tokens is not None and entry.window is not None:
            window = entry.window + call_tokens
            if isinstance(length, Pages) or length > window:
                return WindowEntries(
                    jnp.zeros((*leading, entry.heads, window, entry.dim), entry.dtype)
                )
        if entry.length is None and isinstance(length, Pages):
            return pages.empty(entry.heads, leading[0], length, entry.dim, entry.dtype, entry.rate)
        C = entry.length if isinstance(length, Pages) else entry.places(length)
        if entry.has_several_queries and transposes_keys:
            return TransposedKeys(jnp.zeros((*leading, entry.heads, entry.dim, C), entry.dtype))
        return jnp.zeros((*leading, entry.heads, C, entry.dim), entry.dtype)

    return {name: array(entry) for name, entry in stored_entries(spec, config, *options).items()}


def has_pools(cache: object) -> bool:
    """Returns whether entries of the cache lie in pages."""
    return any(
        isinstance(leaf, Pool)
        for leaf in jax.tree.leaves(cache, is_leaf=lambda leaf: isinstance(leaf, Pool))
    )


def unrolled(cache: tuple, config: DecoderConfig) -> tuple:
    """Returns a scanned cache without pools as an unrolled one, with one part per repeat. A stack
    may store nothing."""

    def parts(part: tuple, repeats: int) -> tuple:
        return tuple(
            jax.tree.map(lambda array, r=r: array[r : r + 1], part) for r in range(repeats)
        )

    return tuple(
        parts(part, stack.repeats) for (part,), stack in zip(cache, config.stacks, strict=True)
    )


def scanned(cache: tuple) -> tuple:
    """Returns an unrolled cache without pools as a scanned one; undoes `unrolled`."""
    return tuple((jax.tree.map(lambda *parts: jnp.concatenate(parts), *stack),) for stack in cache)


class Drafts(NamedTuple):
    """The state that drafting needs in addition to the decoder's cache.

    layers: the cache of each prediction module's layer, arrays [1, S, K, C, D].
    hidden: the decoder's states at the last W tokens that it has seen, [1, S, 1, W, E].
    """

    layers: tuple[dict[str, CacheArray], ...]
    hidden: jax.Array


def supports_truncation(spec: LayerSpec, config: DecoderConfig) -> bool:
    """Whether the same positions may be fed to a layer again: it stores no state of fixed size."""
    return all(entry.length is None for entry in entries(spec, config).values())


def create_drafts(
    config: DecoderConfig, slots: int, storage: tuple, *, modules: int, window: int
) -> Drafts:
    """Makes empty `Drafts` for the first `modules` prediction modules, with W = `window`.

    storage: (length of the cache, its dtype, its quantization).
    """
    assert config.multi_token_prediction is not None, "drafts need prediction modules"
    spec = config.multi_token_prediction.layer
    layers = tuple(_empty(spec, config, (1, slots), storage) for _ in range(modules))
    return Drafts(layers, jnp.zeros((1, slots, 1, window, config.hidden_size), storage[1]))


def commit(cache: tuple, aux: Aux, counts_S: jax.Array) -> tuple:
    """Returns the cache after a tentative call in which the first counts[s] tokens of slot s are
    accepted (0: none)."""

    def last_accepted(before_RSKCD, after_RSTKCD):
        index = jnp.maximum(counts_S - 1, 0)[None, :, None, None, None, None]
        after = jnp.take_along_axis(after_RSTKCD, index, axis=2)[:, :, 0].astype(before_RSKCD.dtype)
        return jnp.where((counts_S > 0)[None, :, None, None, None], after, before_RSKCD)

    def layer(arrays, states, r):
        """r: number of the part, which holds one repeat if there are several."""
        after = {
            name: a[r * len(arrays[name]) : (r + 1) * len(arrays[name])]
            for name, a in (states or {}).items()
        }
        return arrays | {name: last_accepted(arrays[name], a) for name, a in after.items()}

    return tuple(
        tuple(
            tuple(
                layer(arrays, aux.layers[f"stacks.{s}.layers.{i}"].states, r)
                for i, arrays in enumerate(part)
            )
            for r, part in enumerate(parts)
        )
        for s, parts in enumerate(cache)
    )


def insert(cache: tuple, prefix: tuple, slots: jax.Array, step: Step | None = None) -> tuple:
    """Copies row b of `prefix` to slot slots[b] of `cache`. Slots past the end, all different, are
    skipped.

    prefix: a contiguous cache of the T tokens of `step`, from position 0 on. States of fixed size
    have the same shape in both caches and are copied completely. Sliding windows must have entries
    for T tokens. Pools take the entries that are not padding to the step's pages.
    """

    def copy(target, source):
        return target.at[:, slots, :, : source.shape[3]].set(
            source, mode="drop", unique_indices=True
        )

    def copy_leaf(target, source):
        match target:
            case Pool():
                assert step is not None and step.pages is not None, (
                    "a paged cache needs the pages of its rows"
                )
                return pages.insert(target, step.pages, step, source)
            case WindowEntries():
                return WindowEntries(copy(target.array, source))
            case TransposedKeys():
                return target.insert(slots, source)
        return copy(target, source)

    kinds = Pool | WindowEntries | TransposedKeys
    return jax.tree.map(copy_leaf, cache, prefix, is_leaf=lambda leaf: isinstance(leaf, kinds))


def routes(cache: tuple, row: jax.Array, pages_M: jax.Array | None = None) -> dict[str, jax.Array]:
    """Reads the experts of the entries of a row: int[C, R, k] by path of the layer.

    pages_M: the row's pages; None if the cache is contiguous.
    """

    def routes_of(array):
        if not isinstance(array, Pool):
            return jnp.swapaxes(array[:, row, 0], 0, 1)
        routes_MRPk = array.array.at[0, :, pages_M].get(mode="promise_in_bounds")[..., : array.dim]
        return jnp.swapaxes(routes_MRPk, 1, 2).reshape(-1, routes_MRPk.shape[1], array.dim)

    return {
        f"stacks.{s}.layers.{i}": jnp.concatenate(
            [routes_of(part[i][ROUTES]) for part in parts], axis=1
        )
        for s, parts in enumerate(cache)
        for i, arrays in enumerate(parts[0])
        if ROUTES in arrays
    }


def bytes_per_token(
    config: DecoderConfig, dtype: DTypeLike, quantization: StoredType | None = None
) -> int:
    """Counts the bytes of one token in the cache, over all layers, scales included.

    States of fixed size count nothing.
    """
    stored = (e for e in _all_stored(config, dtype, quantization) if e.length is None)
    return math.ceil(sum(Fraction(e.heads * e.dim * e.bits, 8 * (e.rate or 1)) for e in stored))


def bytes_per_page(
    config: DecoderConfig, size: int, dtype: DTypeLike, quantization: StoredType | None = None
) -> int:
    """Counts the bytes of a page of `size` tokens, over all layers, padding of entries included."""
    stored = (e for e in _all_stored(config, dtype, quantization) if e.length is None)
    return sum(e.places(size) * e.heads * pages.padded_dim(e.dim) * e.bits for e in stored) // 8


def bytes_per_slot(config: DecoderConfig, dtype: DTypeLike) -> int:
    """Counts the bytes of the states of fixed size of one slot, over all layers."""
    stored = _all_stored(config, dtype, None)
    return sum(e.heads * e.length * e.dim * e.bits for e in stored if e.length is not None) // 8


def _all_stored(
    config: DecoderConfig, dtype: DTypeLike, quantization: StoredType | None
) -> list[Entry]:
    return [
        entry
        for spec in config.layers
        for entry in stored_entries(spec, config, dtype, quantization).values()
    ]
