"""Blocks of pages that a TPU kernel reads from HBM, each block while the one before is worked on.

The programs of the kernel run one after the other: program i computes head i % K of row i // K.

B rows, K key-value heads, D head dimension, L pages of a row, N pages of a pool, P tokens of a
page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CarryT = TypeVar("CarryT")
Index = jax.Array | int


def scratch_shapes(block: int, *pools_KNPD: jax.Array) -> list[Any]:
    """Returns the scratch memory of a kernel that reads blocks of `block` pages of each of these
    pools.

    Two halves of a buffer for each pool, the half that holds the next block, and a semaphore for
    each half.
    """
    buffers = (pltpu.VMEM((2, block, *pool.shape[2:]), pool.dtype) for pool in pools_KNPD)
    return [*buffers, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))]


class OnlineSoftmax(NamedTuple):
    """A softmax over the keys so far, of each query: its largest score `top`, the sum of its
    exponentials `total`, less `top`, and the sum of values with them as weights, `values`;
    float32."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class PageBlocks:
    """The pages of the rows of a kernel, as references of Pallas.

    table: int32[B L], where the pages of each row lie. pools: [K, N, P, D] each, in HBM. scratch:
    of `scratch_shapes`. is_seen(row, page): whether a row sees an entry of its page number `page`;
    other pages are not read.
    """

    table: Any
    pools: Sequence[Any]
    scratch: Sequence[Any]
    is_seen: Callable[[Index, Index], jax.Array]

    def row_and_head(self, program: Index) -> tuple[Index, Index]:
        """Returns the row and the head that a program computes."""
        heads = self.pools[0].shape[0]
        return (program // heads, program % heads) if heads > 1 else (program, 0)

    def fold(self, end: Index, work: Callable[..., CarryT], carry: CarryT) -> CarryT:
        """Returns the carry after carry = work(first, carry, *entries) for each block of this
        program.

        end: how many entries the pages of its row hold, 1 or more. first: the number of the first
        entry of a block. entries: [block * P, D] of each pool. The next block, which may be the
        first of the next program, is fetched meanwhile.
        """
        *buffers, turn, _ = self.scratch
        program = pl.program_id(0)
        tokens = buffers[0].shape[1] * buffers[0].shape[2]
        blocks = pl.cdiv(end, tokens)

        @pl.when(program == 0)
        def _():
            turn[0] = 0
            for buffer in buffers:
                buffer[...] = jnp.zeros_like(buffer)  # entries with weight 0 must be numbers
            self._start(0, 0, 0)

        before = turn[0]

        def step(number, carry):
            half = (before + number) % 2
            last = number + 1 == blocks

            @pl.when(jnp.logical_not(last) | (program + 1 < pl.num_programs(0)))
            def _():
                self._start(
                    jnp.where(last, program + 1, program), jnp.where(last, 0, number + 1), 1 - half
                )

            self._each_page(program, number, half, lambda copy: copy.wait())
            return work(
                number * tokens, carry, *(buffer[half].reshape(tokens, -1) for buffer in buffers)
            )

        carry = jax.lax.fori_loop(0, blocks, step, carry)
        turn[0] = (before + blocks) % 2
        return carry

    def _start(self, program: Index, number: Index, half: Index) -> None:
        self._each_page(program, number, half, lambda copy: copy.start())

    def _each_page(
        self,
        program: Index,
        number: Index,
        half: Index,
        do: Callable[[Any], None],
    ) -> None:
        """Calls `do` with the copies of each page of a block that a program sees."""
        *buffers, _, arrived = self.scratch
        (row, head), block = self.row_and_head(program), buffers[0].shape[1]
        width = self.table.shape[0] * self.pools[0].shape[0] // pl.num_programs(0)
        for j in range(block):
            page = number * block + j

            @pl.when(self.is_seen(row, page))
            def _(j=j, page=page):
                for pool, buffer in zip(self.pools, buffers, strict=True):
                    source = pool.at[head, self.table[row * width + page]]
                    do(pltpu.make_async_copy(source, buffer.at[half, j], arrived.at[half]))
