"""Chooses how long the packed rows of a batch are, and how many a micro-batch has.

The choice depends on the lengths of the batch and on bounds of the stage alone, so a resumed run
packs in the same way. It tries shapes in a fixed order and takes the first whose micro-batches are
full enough, so most batches of a stage meet few programs. If none is, it takes the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MAX_LENGTHS = 8
"""The most lengths that are tried for a batch."""
MICRO_DIVISORS = (1, 2, 4, 8)
"""A micro-batch has the most rows that it may have, divided by one of these."""
DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16)
"""The same, where one micro-batch has all packed rows."""
STEPS = (4, 8, 16)
"""The numbers of lengths from a power of two to the next. Lengths of the first are tried first."""
MANY = 512
"""With so many sequences a batch has four lengths from a power of two to the next, which are full
enough for them."""
LEAST_STEP = 8
"""Lengths are multiples of it, or the limit, so that short rows have few lengths too."""
EVEN_PASSES = 4
"""Besides the fewest micro-batches, so many larger numbers of them are tried."""
SLACKS = (1.0, 1.04)
"""Rows are tried that are exactly full, and those that have 4% of room."""
FULL_ENOUGH = ((32, 0.95), (0, 0.90))
"""(sequences, the share of real tokens that ends the search from so many sequences on)."""
OVERHEAD = 24
"""What a micro-batch costs besides its tokens, in tokens: it adds a gradient to the sum of the
others, two passes over memory for each weight, where a token makes 6 operations with it."""
MOST_OVERHEAD = 0.1
"""The share of overhead that ends the search."""


class RowShape(NamedTuple):
    """The packed rows of a micro-batch, and the tokens of each."""

    micro_rows: int
    length: int


class Sizes(NamedTuple):
    """How many sequences or trees a batch has, the tokens of all, and those of the longest."""

    sequences: int
    tokens: int
    longest: int


def rounded_up(tokens: int, steps: int) -> int:
    """Returns the least number of tokens that is at least `tokens`, with `steps` such numbers from
    each power of two to the next."""
    unit = max(LEAST_STEP, 2 ** math.floor(math.log2(max(1, tokens))) // steps)
    return -(-tokens // unit) * unit


@dataclass(frozen=True)
class RowBounds:
    """What bounds the packed rows of a batch.

    sequences: rows of the batch, before they are packed. sequence: most tokens of such a row.
    limit: most tokens of what stays in one packed row, a sequence or a tree. most_rows: most packed
    rows of one of several micro-batches. micro_tokens: most tokens of a micro-batch, unless one
    packed row for each device has more; None: one micro-batch has all packed rows. stretched: a
    micro-batch may have two of the longest sequence for each device, up to so many tokens, since
    long rows that only one sequence fits into stay half empty. longest: most tokens of a packed
    row, unless a sequence has more. row_multiple, length_multiple: the numbers of rows and their
    lengths are multiples of these. few_rows_first: whether few long rows are preferred to
    many short ones; they meet fewer programs. few_lengths: whether a program takes so long to
    compile that there are four lengths from a power of two to the next for any batch.
    """

    sequences: int
    sequence: int
    limit: int
    most_rows: int
    micro_tokens: int | None
    longest: int
    stretched: int = 0
    row_multiple: int = 1
    length_multiple: int = 1
    few_rows_first: bool = False
    few_lengths: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns those of STEPS that batches of the stage have."""
        return STEPS[:1] if self.few_lengths or self.sequences >= MANY else STEPS

    def program_rows(self, shape: RowShape) -> int:
        """Returns the packed rows of a program: room for all sequences of any batch."""
        if self.micro_tokens is None:
            return shape.micro_rows
        most = -(-self.sequences // max(1, shape.length // self.sequence))
        return -(-most // shape.micro_rows) * shape.micro_rows

    def shapes(self, sizes: Sizes, enough: float) -> list[RowShape]:
        """Returns the shapes to try, in order of preference: those that are full enough if the
        sequences could be cut come first.

        enough: the share of real tokens.
        """
        longest = sizes.longest
        promising: dict[RowShape, None] = {}
        others: dict[RowShape, None] = {}
        for steps in self.steps:
            for rows in self._row_counts():
                for passes, even in self._even_lengths(sizes, rows):
                    shape = RowShape(rows, self._length(max(even, longest), steps))
                    if self._allowed(shape, longest):
                        full = sizes.tokens >= enough * passes * rows * shape.length
                        (promising if full else others)[shape] = None
        lengths: set[int] = set()
        tried = []
        for shape in promising | others:
            if len(lengths | {shape.length}) <= MAX_LENGTHS:
                lengths.add(shape.length)
                tried.append(shape)
        return tried or [self.shortest(longest)]

    def shortest(self, longest: int) -> RowShape:
        """Returns the shape with the shortest rows that hold a sequence of `longest` tokens, which
        every batch of the stage fits into."""
        rows = max(self._row_counts()) if self.micro_tokens is None else self.row_multiple
        return RowShape(rows, self._length(longest, self.steps[-1]))

    def _row_counts(self) -> list[int]:
        m = self.row_multiple
        one = self.micro_tokens is None
        most = -(-(self.sequences if one else min(self.most_rows, self.sequences)) // m)
        divisors = DIVISORS if one else MICRO_DIVISORS
        counts = dict.fromkeys(max(1, most // divisor) * m for divisor in divisors)
        return sorted(counts, reverse=not self.few_rows_first)

    def _even_lengths(self, sizes: Sizes, rows: int) -> list[tuple[int, int]]:
        """Returns (micro-batches, length of the rows over which the tokens spread evenly), for the
        fewest micro-batches and for a few more."""
        tokens = sizes.tokens
        if self.micro_tokens is None:
            return [(1, math.ceil(tokens * slack / rows)) for slack in SLACKS]
        fewest = -(-tokens // self._most_tokens(self.micro_tokens, sizes.longest))
        number = sizes.sequences
        # Sequences of about one length fill rows of which each has the same number of them.
        even = {-(-number // (each * rows)) for each in range(1, number + 1)}
        passes = [fewest, *sorted(n for n in even if n > fewest)[:EVEN_PASSES]]
        return [(n, math.ceil(tokens * slack / (rows * n))) for n in passes for slack in SLACKS]

    def _length(self, tokens: int, steps: int) -> int:
        length = rounded_up(tokens, steps)
        if tokens <= self.limit:
            length = min(length, self.limit)
        return -(-length // self.length_multiple) * self.length_multiple

    def _allowed(self, shape: RowShape, longest: int) -> bool:
        if shape == self.shortest(longest):
            return True
        if shape.length > max(self.longest, self._length(longest, self.steps[-1])):
            return False
        if self.micro_tokens is None:
            return True
        most = self._most_tokens(self.micro_tokens, longest)
        return shape.micro_rows * shape.length <= most

    def _most_tokens(self, micro_tokens: int, longest: int) -> int:
        return max(micro_tokens, self.row_multiple * min(2 * longest, self.stretched))


def choose_shape(bounds: RowBounds, sizes: Sizes, filled_rows: Callable[[int], int]) -> RowShape:
    """Returns the shape of the packed rows of a batch.

    filled_rows: returns how many packed rows of a length the sequences fill. A batch without
    tokens, in which nothing has a score, has the shape of one token.
    """
    sizes = Sizes(sizes.sequences, max(1, sizes.tokens), max(1, sizes.longest))
    tokens = sizes.tokens
    enough = next(share for least, share in FULL_ENOUGH if sizes.sequences >= least)
    filled: dict[int, int] = {}
    cheapest: tuple[int, RowShape] | None = None
    for shape in bounds.shapes(sizes, enough):
        if shape.length not in filled:
            filled[shape.length] = filled_rows(shape.length)
        passes = max(1, -(-filled[shape.length] // shape.micro_rows))
        if passes > 1 and bounds.micro_tokens is None:
            continue
        computed = passes * shape.micro_rows * shape.length
        cost = computed + passes * OVERHEAD
        if tokens >= enough * computed and tokens >= (enough - MOST_OVERHEAD) * cost:
            return shape
        if cheapest is None or cost < cheapest[0]:
            cheapest = (cost, shape)
    return bounds.shortest(sizes.longest) if cheapest is None else cheapest[1]
