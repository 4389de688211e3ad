"""Pages of a cache: entries by position lie in a pool of pages of P tokens, and a table names the
pages of each row.

The pool of a stack holds the pages of all its layers, [K, R, N, P, D] with the heads first, as
decoding kernels read it: seen as [K, R N, P, D], which is the same memory, page n of layer r is
number r N + n. A kernel or a gather must read the pool itself: to slice a layer out of it would
copy the layer.

A table int32[B, M] names the pages of each row in the order of its tokens: position p is entry p %
P of page table[b, p // P]. Rows may share pages that none of them writes. Page 0 belongs to no row:
it pads the rows of a table. Writes at padding and past the end of a table are dropped.

On a mesh that shards the rows of a call, the pages of a pool are sharded the same way, N / n to
each of the n shards. Page numbers count over the full pool; a device reads its own shard only, so a
row's pages must lie in the shard of the pool that goes with its shard of the rows.

Shapes: K heads, R repeats of a stack, N pages, P tokens of a page, D head dimension, B rows, T
tokens, M pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.cache.blocks import BlockEntries
from policy.cache.step import Step
from policy.mesh.sharding import Layout


class Pages(NamedTuple):
    """The size of a paged cache: the number of its pages, page 0 included, and the tokens of
    each."""

    number: int
    size: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """The entries of one name for all layers of a stack part: [K, R, N, P, `padded_dim(D)`]; `dim`
    is D. `blocks`: the entries are those of blocks, P to a page; None: of tokens."""

    array: jax.Array
    dim: int = field(metadata={"static": True})
    blocks: BlockEntries | None = field(default=None, metadata={"static": True})


LANES = 128

# Logical axes of a pool.
AXES = ("cache_heads", None, "cache_batch", None, None)


def padded_dim(dim: int) -> int:
    """Returns the stored numbers of an entry: more than 128 are padded to a multiple of 128 lanes.

    A TPU pads them anyway if the entries of a page are to lie together. Left at 576, the compiler
    orders the pool by pages and copies it for every kernel.
    """
    return dim if dim < LANES else -(-dim // LANES) * LANES


def empty(
    heads: int,
    repeats: int,
    pages: Pages,
    dim: int,
    dtype: DTypeLike | None,
    rate: int | None = None,
) -> Pool:
    """Makes a pool of zeros. `rate`: an entry stands for so many tokens; None: for one."""
    blocks = None if rate is None else BlockEntries(rate, pages.size)
    size = pages.size if blocks is None else blocks.per_page
    return Pool(
        jnp.zeros((heads, repeats, pages.number, size, padded_dim(dim)), dtype), dim, blocks
    )


def write(
    pool: Pool,
    layer: jax.Array | int,
    table_BM: jax.Array,
    step: Step,
    value_BKTD: jax.Array,
    layout: Layout | None,
) -> Pool:
    """Writes entries of layer number `layer` at the step's positions. Padding is dropped. Returns
    the pool.

    Where a mesh shards rows and pages (`layout`), each device writes the entries of its own rows;
    the partitioner would send the entries of all rows to all devices.
    """
    page_BT, offset_BT = _page_and_offset(pool, table_BM, step)
    pool_spec, row_axes = _specs(pool, len(table_BM), layout, step.anywhere)
    number = pool.array.shape[2]

    def put(array, layer, page_BT, offset_BT, value_BKTD):
        # Heads are indices too: a window over them makes a TPU lay the pool out by it, with a copy
        # before and after.
        head = jnp.arange(array.shape[0])[:, None, None]
        size = array.shape[2]
        local_page = jnp.where(page_BT < number, page_BT % size, page_BT - number + size)
        return _put(
            replace(pool, array=array),
            (head, layer, local_page, offset_BT),
            jnp.swapaxes(value_BKTD, 0, 1),
        ).array

    if row_axes is not None:
        assert layout is not None and pool_spec is not None
        by_row = PartitionSpec(row_axes)
        specs = (pool_spec, PartitionSpec(), by_row, by_row, PartitionSpec(row_axes, pool_spec[0]))
        put = jax.shard_map(
            put, mesh=layout.mesh, in_specs=specs, out_specs=pool_spec, check_vma=False
        )
    return replace(pool, array=put(pool.array, jnp.asarray(layer), page_BT, offset_BT, value_BKTD))


def insert(pool: Pool, table_BM: jax.Array, step: Step, value_RBKTD: jax.Array) -> Pool:
    """Writes entries of all layers at the step's positions, or those of the blocks that its tokens
    complete, which start at position 0. Padding is dropped. Returns the pool."""
    K, R = pool.array.shape[:2]
    if pool.blocks is not None:
        step = _step_of_blocks(pool.blocks, step, value_RBKTD.shape[3])
    page_BT, offset_BT = _page_and_offset(pool, table_BM, step)
    head = jnp.arange(K)[:, None, None, None]
    layer = jnp.arange(R)[:, None, None]
    return _put(pool, (head, layer, page_BT, offset_BT), jnp.moveaxis(value_RBKTD, 2, 0))


def _step_of_blocks(blocks: BlockEntries, step: Step, count: int) -> Step:
    """Returns the step that writes the first `count` entries of rows whose tokens start at position
    0."""
    ends = jnp.arange(1, count + 1) * blocks.rate - 1
    complete = ends < jnp.sum(step.segments != 0, axis=1, keepdims=True)
    places = jnp.broadcast_to(blocks.places(ends), complete.shape)
    return Step(places, complete.astype(jnp.int32), pages=step.pages, anywhere=step.anywhere)


def _page_and_offset(pool: Pool, table_BM: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
    """Returns (page, offset in it) of the step's positions, int32[B, T] each.

    Padding gets distinct pages past the last one.
    """
    B, T = step.positions.shape
    N, P, M = *pool.array.shape[2:4], table_BM.shape[1]
    column = step.positions // P
    in_table = (step.segments != 0) & (column < M)
    page = jnp.take_along_axis(table_BM, jnp.minimum(column, M - 1), axis=1)
    beyond = N + jnp.arange(B * T, dtype=page.dtype).reshape(
        B, T
    )  # all different, so that indices are unique
    return jnp.where(in_table, page, beyond), step.positions % P


def _put(pool: Pool, at: tuple, value: jax.Array) -> Pool:
    array = pool.array
    written = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, array.shape[-1] - pool.dim)])
    return replace(
        pool, array=array.at[at].set(written.astype(array.dtype), mode="drop", unique_indices=True)
    )


def visible_columns(lookback: int, tokens: int, size: int) -> int:
    """Returns how many pages of `size` hold all that so many tokens of a row see, wherever they
    start in a page."""
    return -(-(lookback + tokens - 1 + size - 1) // size)


def visible_table(
    table_BM: jax.Array, step: Step, lookback: int, size: int
) -> tuple[jax.Array, jax.Array | int]:
    """Returns (the columns of a table that the step's queries see, the position of their first
    entry).

    The position is int32[B, 1], or 0 for the complete table.

    lookback: how many tokens a query looks back at most, itself included. size: tokens of a page.
    The tokens of a row follow one another.
    """
    T = step.positions.shape[1]
    M = table_BM.shape[1]
    columns = visible_columns(lookback, T, size)
    if columns >= M:
        return table_BM, 0
    lowest = jnp.min(jnp.where(step.segments != 0, step.positions, M * size), axis=1, keepdims=True)
    first = jnp.clip((lowest - lookback + 1) // size, 0, M - columns)
    return jnp.take_along_axis(table_BM, first + jnp.arange(columns), axis=1), first * size


def gather(
    pool: Pool,
    layer: jax.Array | int,
    table_BM: jax.Array,
    layout: Layout | None = None,
    anywhere: bool = False,
) -> jax.Array:
    """Reads all entries of the rows' pages, in the order of the table: [B, K, M P, D].

    `_read` explains the last arguments.
    """

    def read(array, layer, page_BM, mode):
        pages = array.at[:, layer, page_BM].get(mode=mode, fill_value=0)[..., : pool.dim]
        K, B, M, P, D = pages.shape
        return jnp.swapaxes(pages.reshape(K, B, M * P, D), 0, 1)

    return _read(read, pool, layer, table_BM, 1, layout, anywhere)


def pick(
    pool: Pool,
    layer: jax.Array | int,
    at_BTk: jax.Array,
    table_BM: jax.Array,
    layout: Layout | None,
    anywhere: bool,
) -> jax.Array:
    """Reads the entries of all heads at positions `at` of a pool: [B, K, T, k, D]."""
    P = pool.array.shape[3]
    page = jnp.take_along_axis(table_BM, (at_BTk // P).reshape(len(table_BM), -1), axis=1).reshape(
        at_BTk.shape
    )

    def read(array, layer, number, mode):
        entries = array.at[:, layer, number // P, number % P].get(mode=mode, fill_value=0)[
            ..., : pool.dim
        ]
        return jnp.moveaxis(entries, 0, 1)

    return _read(read, pool, layer, page * P + at_BTk % P, P, layout, anywhere)


def _read(
    read: Callable[..., jax.Array],
    pool: Pool,
    layer: jax.Array | int,
    number: jax.Array,
    per_page: int,
    layout: Layout | None,
    anywhere: bool,
) -> jax.Array:
    """Returns read(array, layer, number [B, ...], mode) [B, ...]. The numbers count pages, or
    entries if `per_page` is P.

    For a pool that the mesh shards, the partitioner would send all pages of the layer to all
    devices. Here each device reads its own rows from its own pages. Where a row's pages may lie
    `anywhere`, or there are too few rows to be sharded, each device reads its shard for all rows,
    and the results are summed.
    """
    pool_spec, row_axes = _specs(pool, len(number), layout, anywhere)
    if pool_spec is None:
        return read(pool.array, layer, number, "promise_in_bounds")
    assert layout is not None

    def local(array, layer, number):
        size = array.shape[2] * per_page
        if row_axes:
            return read(array, layer, number % size, "promise_in_bounds")
        local_page = jnp.where(
            number // size == jax.lax.axis_index(pool_spec[2]), number % size, size
        )
        return jax.lax.psum(read(array, layer, local_page, "fill"), pool_spec[2])

    specs = (pool_spec, PartitionSpec(), PartitionSpec(row_axes))
    out = PartitionSpec(row_axes, pool_spec[0])
    run = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)
    return run(pool.array, jnp.asarray(layer), number)


def _specs(
    pool: Pool, rows: int, layout: Layout | None, anywhere: bool
) -> tuple[PartitionSpec | None, tuple[str, ...] | None]:
    """Returns (the sharding of a pool, the mesh axes that shard so many rows).

    The first is None where the pages are not sharded; the second is None where rows are not sharded
    as their pages are.
    """
    spec = None if layout is None or layout.mesh.size == 1 else layout.spec(AXES, pool.array.shape)
    if layout is None or spec is None or spec[2] is None:
        return None, None
    row_axes = layout.spec(("cache_batch",), (rows,))[0]
    return spec, None if anywhere or row_axes != spec[2] else row_axes


def copy(pool: Pool, source_n: jax.Array, target_n: jax.Array) -> Pool:
    """Copies page source[i] over page target[i], in every layer. Numbers past the end, all
    different, are skipped."""
    copied = pool.array.at[:, :, source_n].get(mode="clip")
    return replace(
        pool, array=pool.array.at[:, :, target_n].set(copied, mode="drop", unique_indices=True)
    )
