"""Pages of a cache: entries by position lie in a pool of pages of P tokens, of which a row owns those that its table names.

The pool of a stack holds the pages of all its layers, [K, R, N, P, D] with the heads first, as decoding kernels read it: seen as
[K, R N, P, D], which is the same memory, page n of layer r is number r N + n. A layer must not be sliced out of it for a kernel or
a gather: that copies the layer.

A table int32[B, M] names the pages of each row in the order of its tokens: position p is entry p % P of page table[b, p // P].
Rows may share pages that none of them writes. Page 0 is nobody's, so that 0 fills up the rows of a table; what is written at
padding, or past the end of a table, is dropped.

On a mesh that cuts the rows of a call, the pages of a pool are cut the same way, N / n to each of the n parts of the rows. Page
numbers are those of the whole pool; kernels read only their own part, so a row's pages must lie in the part of the pool that goes
with its part of the rows.

Shapes: K heads, R repeats of a stack, N pages, P tokens of a page, D head dimension, B rows, T tokens, M pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.sharding import Layout


class Pages(NamedTuple):
    """What a paged cache has in the place of a length: the number of its pages, page 0 among them, and the tokens of each."""

    number: int
    size: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """The entries of one name of all layers of a stack part: [K, R, N, P, `filled(D)`]; `dim` is D."""

    array: jax.Array
    dim: int = field(metadata={"static": True})


LANES = 128

# Logical axes of a pool.
AXES = ("cache_heads", None, "cache_batch", None, None)


def filled(dim: int) -> int:
    """Numbers of an entry with those that fill it up: more than 128 are whole lanes of 128, as a TPU lays them out anyway if the
    entries of a page are to lie together. Left at 576, the compiler lays the pool out by pages, and copies it for every kernel."""
    return dim if dim < LANES else -(-dim // LANES) * LANES


def empty(heads: int, repeats: int, pages: Pages, dim: int, dtype) -> Pool:
    return Pool(jnp.zeros((heads, repeats, *pages, filled(dim)), dtype), dim)


def write(pool: Pool, layer: jax.Array | int, table_BM: jax.Array, step, value_BKTD: jax.Array) -> Pool:
    """The pool with these entries of layer number `layer` at the step's positions; padding is dropped."""
    page_BT, offset_BT = _places(pool, table_BM, step)
    # Heads are indices too: a window over them makes a TPU lay the pool out by it, with a copy before and after.
    head = jnp.arange(pool.array.shape[0])[:, None, None]
    return _put(pool, (head, layer, page_BT, offset_BT), jnp.swapaxes(value_BKTD, 0, 1))


def insert(pool: Pool, table_BM: jax.Array, step, value_RBKTD: jax.Array) -> Pool:
    """The same for all layers."""
    K, R = pool.array.shape[:2]
    page_BT, offset_BT = _places(pool, table_BM, step)
    head, layer = jnp.arange(K)[:, None, None, None], jnp.arange(R)[:, None, None]
    return _put(pool, (head, layer, page_BT, offset_BT), jnp.moveaxis(value_RBKTD, 2, 0))


def _places(pool: Pool, table_BM: jax.Array, step) -> tuple[jax.Array, jax.Array]:
    """(page, place in it), int32[B, T] each, of the step's positions; past the last page, each its own, for padding."""
    B, T = step.positions.shape
    N, P, M = *pool.array.shape[2:4], table_BM.shape[1]
    column = step.positions // P
    kept = (step.segments != 0) & (column < M)
    page = jnp.take_along_axis(table_BM, jnp.minimum(column, M - 1), axis=1)
    beyond = N + jnp.arange(B * T, dtype=page.dtype).reshape(B, T)  # each its own, so that indices are unique
    return jnp.where(kept, page, beyond), step.positions % P


def _put(pool: Pool, at: tuple, value: jax.Array) -> Pool:
    array = pool.array
    written = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, array.shape[-1] - pool.dim)])
    return replace(pool, array=array.at[at].set(written.astype(array.dtype), mode="drop", unique_indices=True))


def looking_back(table_BM: jax.Array, step, back: int, size: int) -> tuple[jax.Array, jax.Array | int]:
    """(the part of a table, of pages of `size` tokens, that the step's queries see when each looks `back` so many tokens at most,
    itself counted; the position of its first entry, int32[B, 1] or 0). The tokens of a row follow one another."""
    T, M = step.positions.shape[1], table_BM.shape[1]
    columns = -(-(back + T - 1 + size - 1) // size)
    if columns >= M:
        return table_BM, 0
    lowest = jnp.min(jnp.where(step.segments != 0, step.positions, M * size), axis=1, keepdims=True)
    first = jnp.clip((lowest - back + 1) // size, 0, M - columns)
    return jnp.take_along_axis(table_BM, first + jnp.arange(columns), axis=1), first * size


def gather(pool: Pool, layer: jax.Array | int, table_BM: jax.Array, layout: Layout | None = None) -> jax.Array:
    """[B, K, M P, D]: all entries of the rows' pages, in the order of the table. `layout`: every row's pages lie in the part of the
    pool that goes with its part of the rows, and devices read their own; left to itself the partitioner sends what all of them
    have read to all."""
    rows, places = None, None
    if layout is not None and layout.mesh.size > 1:
        rows, places = layout.spec(("cache_batch",), table_BM.shape[:1])[0], layout.spec(AXES, pool.array.shape)
    if rows is None or rows != places[2]:
        return _gathered(pool.array, jnp.asarray(layer), table_BM, dim=pool.dim)

    def local(array, layer, table_BM):
        return _gathered(array, layer, table_BM % array.shape[2], dim=pool.dim)

    specs = places, PartitionSpec(), PartitionSpec(rows)
    run = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec(rows, places[0]), check_vma=False)
    return run(pool.array, jnp.asarray(layer), table_BM)


def _gathered(array: jax.Array, layer: jax.Array, table_BM: jax.Array, *, dim: int) -> jax.Array:
    found = array.at[:, layer, table_BM].get(mode="promise_in_bounds")[..., :dim]
    K, B, M, P, D = found.shape
    return jnp.swapaxes(found.reshape(K, B, M * P, D), 0, 1)


def pick(pool: Pool, layer: jax.Array | int, table_BM: jax.Array, at_BTk: jax.Array) -> jax.Array:
    """[B, T, k, D]: the entries at positions `at` of a pool with one head."""
    B, T, k = at_BTk.shape
    P = pool.array.shape[3]
    page = jnp.take_along_axis(table_BM, (at_BTk // P).reshape(B, T * k), axis=1).reshape(B, T, k)
    return pool.array.at[0, layer, page, at_BTk % P].get(mode="promise_in_bounds")[..., : pool.dim]


def copy(pool: Pool, source_n: jax.Array, to_n: jax.Array) -> Pool:
    """Pages source[i] written over pages to[i], in every layer; numbers past the end, all different, are skipped."""
    found = pool.array.at[:, :, source_n].get(mode="clip")
    return replace(pool, array=pool.array.at[:, :, to_n].set(found, mode="drop", unique_indices=True))
