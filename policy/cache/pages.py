"""Pages of a cache: entries by position lie in a pool of pages of P tokens, of which a row owns those that its table names.

The pool of a stack holds the pages of all its layers, [K, R, N, P, D] with the heads first, as decoding kernels read it: seen as
[K, R N, P, D], which is the same memory, page n of layer r is number r N + n. A layer must not be sliced out of it for a kernel or
a gather: that copies the layer.

A table int32[B, M] names the pages of each row in the order of its tokens: position p is entry p % P of page table[b, p // P].
Rows may share pages that none of them writes. Page 0 is nobody's, so that 0 fills up the rows of a table; what is written at
padding, or past the end of a table, is dropped.

On a mesh that cuts the rows of a call, the pages of a pool are cut the same way, N / n to each of the n parts of the rows. Page
numbers are those of the whole pool; a device reads only its own part, so a row's pages must lie in the part of the pool that goes
with its part of the rows.

Shapes: K heads, R repeats of a stack, N pages, P tokens of a page, D head dimension, B rows, T tokens, M pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.mesh.sharding import Layout


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


def write(
    pool: Pool, layer: jax.Array | int, table_BM: jax.Array, step, value_BKTD: jax.Array, layout: Layout | None
) -> Pool:
    """The pool with these entries of layer number `layer` at the step's positions; padding is dropped. Where a mesh cuts rows and
    pages (`layout`), devices write the entries of their own rows; the partitioner would send those of all rows to all devices."""
    page_BT, offset_BT = _places(pool, table_BM, step)
    cut, rows = _cut(pool, len(table_BM), layout, step.anywhere)
    number = pool.array.shape[2]

    def put(array, layer, page_BT, offset_BT, value_BKTD):
        # Heads are indices too: a window over them makes a TPU lay the pool out by it, with a copy before and after.
        head, size = jnp.arange(array.shape[0])[:, None, None], array.shape[2]
        own = jnp.where(page_BT < number, page_BT % size, page_BT - number + size)
        return _put(replace(pool, array=array), (head, layer, own, offset_BT), jnp.swapaxes(value_BKTD, 0, 1)).array

    if rows is not None:
        specs = (cut, PartitionSpec(), PartitionSpec(rows), PartitionSpec(rows), PartitionSpec(rows, cut[0]))
        put = jax.shard_map(put, mesh=layout.mesh, in_specs=specs, out_specs=cut, check_vma=False)
    return replace(pool, array=put(pool.array, jnp.asarray(layer), page_BT, offset_BT, value_BKTD))


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


def gather(
    pool: Pool, layer: jax.Array | int, table_BM: jax.Array, layout: Layout | None = None, anywhere: bool = False
):
    """[B, K, M P, D]: all entries of the rows' pages, in the order of the table. `layout`, `anywhere`: as `_read` takes them."""

    def read(array, layer, page_BM, mode):
        found = array.at[:, layer, page_BM].get(mode=mode, fill_value=0)[..., : pool.dim]
        K, B, M, P, D = found.shape
        return jnp.swapaxes(found.reshape(K, B, M * P, D), 0, 1)

    return _read(read, pool, layer, table_BM, 1, layout, anywhere)


def pick(
    pool: Pool, layer: jax.Array | int, at_BTk: jax.Array, table_BM: jax.Array, layout: Layout | None, anywhere: bool
):
    """[B, T, k, D]: the entries at positions `at` of a pool with one head."""
    P = pool.array.shape[3]
    page = jnp.take_along_axis(table_BM, (at_BTk // P).reshape(len(table_BM), -1), axis=1).reshape(at_BTk.shape)

    def read(array, layer, number, mode):
        return array.at[0, layer, number // P, number % P].get(mode=mode, fill_value=0)[..., : pool.dim]

    return _read(read, pool, layer, page * P + at_BTk % P, P, layout, anywhere)


def _read(read, pool: Pool, layer: jax.Array | int, number: jax.Array, per: int, layout: Layout | None, anywhere: bool):
    """read(array, layer, number [B, ...], mode) [B, ...]; numbers are of pages, or if `per` is P of entries. Of a pool that is cut
    the partitioner would send all pages of the layer to all devices. Here they read their own rows from their own pages; or where
    those of a row may lie `anywhere`, or rows are too few to be cut, what they have of all rows, which is added up."""
    cut, rows = _cut(pool, len(number), layout, anywhere)
    if cut is None:
        return read(pool.array, layer, number, "promise_in_bounds")

    def local(array, layer, number):
        size = array.shape[2] * per
        if rows:
            return read(array, layer, number % size, "promise_in_bounds")
        own = jnp.where(number // size == jax.lax.axis_index(cut[2]), number % size, size)
        return jax.lax.psum(read(array, layer, own, "fill"), cut[2])

    specs, out = (cut, PartitionSpec(), PartitionSpec(rows)), PartitionSpec(rows, cut[0])
    run = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)
    return run(pool.array, jnp.asarray(layer), number)


def _cut(pool: Pool, rows: int, layout: Layout | None, anywhere: bool):
    """(how the mesh cuts a pool, None where its pages are whole; how it cuts so many rows, None where they do not go with their
    pages)."""
    cut = None if layout is None or layout.mesh.size == 1 else layout.spec(AXES, pool.array.shape)
    if cut is None or cut[2] is None:
        return None, None
    over = layout.spec(("cache_batch",), (rows,))[0]
    return cut, None if anywhere or over != cut[2] else over


def copy(pool: Pool, source_n: jax.Array, to_n: jax.Array) -> Pool:
    """Pages source[i] written over pages to[i], in every layer; numbers past the end, all different, are skipped."""
    found = pool.array.at[:, :, source_n].get(mode="clip")
    return replace(pool, array=pool.array.at[:, :, to_n].set(found, mode="drop", unique_indices=True))
