"""The order in which a stage takes the rows of its data.

A dataset is shuffled anew for each pass over it. Of several datasets, a `Mixture` says which one
gives the next row.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rl.data.drawing.mixture import Mixture, MixturePart, mixture


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of one or several datasets, pass after pass.

    Rows are numbered from those of the first dataset on.

    parts: the datasets, with the number of rows that are taken from each. seed: of the shuffles.
    rows: the rows that are taken, in ascending order; None: all.
    """

    parts: Sequence[MixturePart]
    seed: int
    rows: Sequence[int] | None = None

    def take(self, numbers: Sequence[int]) -> list[int]:
        """Returns the rows that stand at these places of the order: 0, 1, 2, ..."""
        starts = self._starts
        taken = []
        for part, before in map(self._mixture.place, numbers):
            row = starts[part] + shuffled(self.seed, self.parts[part].rows, before, part)
            taken.append(row if self.rows is None else self.rows[row])
        return taken

    def epochs(self, drawn: int) -> dict[str, float]:
        """Returns how many passes over each dataset the first `drawn` rows make, by name."""
        counts = self._mixture.counts(drawn)
        return {
            part.name: count / part.rows for part, count in zip(self.parts, counts, strict=True)
        }

    def among(self, rows: Sequence[int]) -> RowOrder:
        """Returns an order of these rows of all.

        Each dataset keeps its weight; one without a weight has as much as it has rows left.
        """
        assert self.rows is None
        chosen = sorted(rows)
        parts = []
        start = 0
        for part in self.parts:
            count = bisect_left(chosen, start + part.rows) - bisect_left(chosen, start)
            start += part.rows
            if count:
                parts.append(replace(part, rows=count))
        return RowOrder(parts, self.seed, chosen)

    @cached_property
    def _mixture(self) -> Mixture:
        return mixture([part.weight or part.rows for part in self.parts])

    @cached_property
    def _starts(self) -> list[int]:
        """The number of the first row of each dataset."""
        return [sum(part.rows for part in self.parts[:n]) for n in range(len(self.parts))]


def shuffled(seed: int, rows: int, index: int, part: int = 0) -> int:
    """Returns the row of a dataset that is taken as number `index`: each pass over the data is a
    permutation of its rows.

    part: number of the dataset among several; they have different orders. The result depends on the
    arguments only, so that a resumed run continues with the next row.
    """
    epoch, place = divmod(index, rows)
    return int(_permutation(seed, rows, epoch, part)[place])


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, rows: int, epoch: int, part: int) -> np.ndarray:
    sequence = np.random.SeedSequence([seed, epoch] if part == 0 else [seed, epoch, part])
    return np.random.Generator(np.random.Philox(sequence)).permutation(rows)
