"""Chooses how long the packed rows of a batch are, and how many a micro-batch has.

The choice depends on the lengths of the batch, on bounds of the stage and on the shapes of its
earlier updates, which a checkpoint holds, so a resumed run packs in the same way. An update has the
cheapest shape of an earlier one, whose program is compiled, as long as the stage stays full enough
or a new shape would save little. New shapes are tried in a fixed order, and the first whose
micro-batches are full enough is taken; if none is, the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_LENGTHS = 8
"""The most lengths that are tried for a batch."""
MICRO_DIVISORS = (1, 2, 4, 8)
"""The rows of one of several micro-batches are the most that it may have, divided by one of
these."""
DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16)
"""The same of a micro-batch that has all packed rows."""
STEPS = (4, 8, 16)
"""How many lengths there are from a power of two to the next: the few lengths of the first number
are tried first, then the finer ones."""
LEAST_STEP = 8
"""Lengths are multiples of it, or the limit, so that short rows have few lengths too."""
EVEN_PASSES = 4
"""How many larger numbers of micro-batches are tried besides the fewest."""
SLACKS = (1.0, 1.04)
"""Rows are tried that are exactly full, and those that have 4% of room."""
FULL_ENOUGH = ((32, 0.95), (0, 0.90))
"""(sequences, the share of real tokens that ends the search from so many sequences on)."""
OVERHEAD = 12
"""What each micro-batch costs besides its tokens, counted in tokens: it adds its gradient to a sum,
which moves 12 bytes for each weight, and a token makes 6 operations with each weight."""
OVERHEAD_ON_CPU = 40
"""The same as measured with SmolLM2-135M on two cores, where products of few rows and reading the
weights count too: eight micro-batches of 72 tokens take 4.7 s, one of 576 takes 3.25 s."""
MOST_OVERHEAD = 0.1
"""By how much the real tokens, divided by the cost with OVERHEAD_ON_CPU, may lie below FULL_ENOUGH
in a shape that ends the search."""
LEAST_SAVED = 0.02
"""A new shape that saves a smaller share of the cost is not worth a program."""
MARGIN = 0.01
"""A batch may fill its rows less than FULL_ENOUGH says, as long as recent updates of the stage, on
the average, fill theirs by so much more than that."""
RECENT = 32
"""The number of updates of that average."""


class RowShape(NamedTuple):
    """The packed rows of a micro-batch, and the tokens of each."""

    micro_rows: int
    length: int


class Sizes(NamedTuple):
    """How many sequences or trees a batch has, the tokens of all, and those of the longest."""

    sequences: int
    tokens: int
    longest: int

    @property
    def enough(self) -> float:
        """Returns the share of real tokens that is full enough."""
        return next(share for least, share in FULL_ENOUGH if self.sequences >= least)


@dataclass
class RowHistory:
    """The packed rows of the updates of a stage so far.

    shapes: each once, in the order in which updates first had them. share: the mean share of real
    tokens; after RECENT updates each new one counts 1/RECENT. updates: their number, at most
    RECENT.
    """

    shapes: list[RowShape] = field(default_factory=list)
    share: float = 0.0
    updates: int = 0

    def add(self, shape: RowShape, share: float) -> None:
        """Adds an update. share: of real tokens."""
        if shape not in self.shapes:
            self.shapes.append(shape)
        self.share = self.share_with(share)
        self.updates = min(self.updates + 1, RECENT)

    def share_with(self, share: float) -> float:
        """Returns the mean share after one more update."""
        return self.share + (share - self.share) / min(self.updates + 1, RECENT)

    def to_json(self) -> dict[str, Any]:
        """Returns the history as values that JSON can hold."""
        shapes = [list(shape) for shape in self.shapes]
        return {"shapes": shapes, "share": self.share, "updates": self.updates}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RowHistory:
        """Reads the output of `to_json`, or {}: no update yet."""
        shapes = [RowShape(*shape) for shape in values.get("shapes", ())]
        return cls(shapes, values.get("share", 0.0), values.get("updates", 0))


def rounded_up(tokens: int, steps: int) -> int:
    """Returns the least number of tokens that is at least `tokens`, with `steps` such numbers from
    each power of two to the next."""
    unit = max(LEAST_STEP, 2 ** math.floor(math.log2(max(1, tokens))) // steps)
    return -(-tokens // unit) * unit


def rounded_down(tokens: int, multiple: int) -> int:
    """Returns the greatest length of at most `tokens` that a packed row may have, a multiple of
    `multiple`; 0: there is none."""
    lengths = range(tokens // multiple * multiple, 0, -multiple)
    return next((n for n in lengths if n == _multiple(rounded_up(n, STEPS[-1]), multiple)), 0)


def _multiple(tokens: int, of: int) -> int:
    return -(-tokens // of) * of


@dataclass(frozen=True)
class RowBounds:
    """What bounds the packed rows of a batch.

    sequences: the number of rows of the batch before they are packed. sequence: most tokens of such
    a row. limit: most tokens of what stays in one packed row, a sequence or a tree.

    micro_tokens: most tokens of a micro-batch, unless one packed row for each device has more;
    None: one micro-batch has all packed rows. most_rows: most packed rows of one of several
    micro-batches. stretched: up to so many tokens for each device, a micro-batch may have twice
    those of the longest sequence, since long rows that only one sequence fits into stay half empty.

    longest: most tokens of a packed row, unless a sequence has more. row_multiple: the packed rows
    of a micro-batch are a multiple of it; length_multiple: so are the tokens of a row.
    few_rows_first: whether few long rows are preferred to many short ones; they meet fewer
    programs.
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

    def program_rows(self, shape: RowShape, filled: int) -> int:
        """Returns the packed rows of a program, for a batch that fills `filled` of them: one
        micro-batch if that is enough, since a program of one adds up no gradients, else room for
        all sequences of any batch."""
        if self.micro_tokens is None or filled <= shape.micro_rows:
            return shape.micro_rows
        most = -(-self.sequences // max(1, shape.length // self.sequence))
        return _multiple(most, shape.micro_rows)

    def shapes(self, sizes: Sizes, enough: float) -> list[RowShape]:
        """Returns the shapes to try, in order of preference: those that are full enough if the
        sequences could be cut come first.

        enough: the share of real tokens.
        """
        longest = sizes.longest
        promising: dict[RowShape, None] = {}
        others: dict[RowShape, None] = {}
        for steps in STEPS:
            for rows in self._row_counts():
                for passes, even in self._even_lengths(sizes, rows):
                    shape = RowShape(rows, self._length(max(even, longest), steps))
                    if self.allows(shape, longest):
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
        return RowShape(rows, self._length(longest, STEPS[-1]))

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
        fewest = -(-tokens // self._most_tokens(sizes.longest))
        number = sizes.sequences
        # Sequences of about one length fill rows of which each has the same number of them.
        even = {-(-number // (each * rows)) for each in range(1, number + 1)}
        passes = [fewest, *sorted(n for n in even if n > fewest)[:EVEN_PASSES]]
        return [(n, math.ceil(tokens * slack / (rows * n))) for n in passes for slack in SLACKS]

    def _length(self, tokens: int, steps: int) -> int:
        length = rounded_up(tokens, steps)
        if tokens <= self.limit:
            length = min(length, self.limit)
        return _multiple(length, self.length_multiple)

    def allows(self, shape: RowShape, longest: int) -> bool:
        """Whether a batch whose longest sequence has so many tokens may have the shape, also one of
        a run that went on with other bounds."""
        rows, length = shape
        shortest = self.shortest(longest)
        if shape == shortest:
            return True
        if length < longest or length % self.length_multiple or rows % self.row_multiple:
            return False
        if length > max(self.longest, shortest.length):
            return False
        return rows * length <= self._most_tokens(longest)

    def largest(self, full: int) -> RowShape:
        """Returns the shape of a micro-batch with the most tokens, of those that hold sequences of
        `limit` tokens, if a batch may have several micro-batches. full: the most packed rows of
        `limit` tokens that a batch fills."""
        shortest = self.shortest(self.limit)
        most = self._most_tokens(self.limit)
        filled = _multiple(full, self.row_multiple)
        fitting = most // shortest.length // self.row_multiple * self.row_multiple
        shapes = [shortest]
        for rows in (*self._row_counts(), min(fitting, filled)):
            if 0 < rows <= filled and rows * shortest.length <= most:
                even = rounded_up(math.ceil(filled * shortest.length / rows), STEPS[0])
                room = min(most // rows, self.longest, even)
                longer = rounded_down(room, self.length_multiple)
                shapes.append(RowShape(rows, max(longer, shortest.length)))
        return max(shapes, key=math.prod)

    def _most_tokens(self, longest: int) -> int:
        """Returns the most tokens of a micro-batch, where `longest` are those of the longest
        sequence, unless one packed row for each device has more."""
        if self.micro_tokens is None:
            return math.prod(self.shortest(self.limit))
        return max(self.micro_tokens, self.row_multiple * min(2 * longest, self.stretched))


class _Costs:
    """What the packed rows of a batch cost, by their shape.

    filled_rows: returns how many packed rows of a length the sequences fill.
    """

    def __init__(self, bounds: RowBounds, sizes: Sizes, filled_rows: Callable[[int], int]):
        self._one_pass = bounds.micro_tokens is None
        self._tokens = sizes.tokens
        self._filled_rows = filled_rows

    def computed(self, shape: RowShape) -> int | None:
        """Returns the computed tokens; None: the sequences do not fit."""
        passes = self._passes(shape)
        return None if passes > 1 and self._one_pass else passes * math.prod(shape)

    def share(self, shape: RowShape) -> float:
        """Returns the share of computed tokens that are real, 0 if the sequences do not fit."""
        computed = self.computed(shape)
        return 0.0 if computed is None else self._tokens / computed

    def cost(self, shape: RowShape, overhead: int = OVERHEAD) -> float:
        """Returns the computed tokens, with `overhead` for each micro-batch; infinite if the
        sequences do not fit."""
        computed = self.computed(shape)
        return math.inf if computed is None else computed + self._passes(shape) * overhead

    def cheapest(self, shapes: Iterable[RowShape]) -> RowShape | None:
        """Returns the cheapest of the shapes, the first of several; None: the sequences fit
        none."""
        fitting = [shape for shape in shapes if self.computed(shape) is not None]
        return min(fitting, key=self.cost, default=None)

    def _passes(self, shape: RowShape) -> int:
        return max(1, -(-self._filled_rows(shape.length) // shape.micro_rows))


def choose_shape(
    bounds: RowBounds,
    sizes: Sizes,
    filled_rows: Callable[[int], int],
    history: RowHistory | None = None,
) -> RowShape:
    """Returns the shape of the packed rows of a batch.

    filled_rows: returns how many packed rows of a length the sequences fill; it is asked for a
    length several times. A batch without tokens, in which nothing has a score, has the shape of one
    token. history: of the updates of the stage; None: the batch has a new shape.
    """
    sizes = Sizes(sizes.sequences, max(1, sizes.tokens), max(1, sizes.longest))
    costs = _Costs(bounds, sizes, filled_rows)
    if history is None:
        return _new_shape(bounds, sizes, costs)
    met = costs.cheapest(s for s in history.shapes if bounds.allows(s, sizes.longest))
    if met is None:
        return _new_shape(bounds, sizes, costs)
    if history.share_with(costs.share(met)) >= sizes.enough + MARGIN:
        return met
    new = _new_shape(bounds, sizes, costs)
    saves = costs.cost(new) < (1 - LEAST_SAVED) * costs.cost(met)
    return new if saves else met


def _new_shape(bounds: RowBounds, sizes: Sizes, costs: _Costs) -> RowShape:
    """Returns the first shape that is full enough, else the cheapest."""
    tried = bounds.shapes(sizes, sizes.enough)
    for shape in tried:
        least = (sizes.enough - MOST_OVERHEAD) * costs.cost(shape, OVERHEAD_ON_CPU)
        if costs.share(shape) >= sizes.enough and sizes.tokens >= least:
            return shape
    return costs.cheapest(tried) or bounds.shortest(sizes.longest)
