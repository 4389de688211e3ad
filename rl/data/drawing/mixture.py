"""Draws from several datasets by weight.

Which dataset gives the n-th row of a stage follows from the weights and n alone: after any number
of rows, each dataset has given its share of them to within one row (R. Tijdeman, The chairman
assignment problem, 1980). Each dataset has its own shuffled order and its own passes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from rl.data import datasets


@dataclass(frozen=True)
class MixturePart:
    """One of the datasets of a stage.

    name: of the dataset. rows: their number on all processes. weight: share of the rows that come
    from it, in relation to the weights of the others; None: `rows`.
    """

    name: str
    rows: int
    weight: float | None = None


class Place(NamedTuple):
    """The place of a row of a stage: number of its dataset, and how many rows of this dataset the
    stage has taken before."""

    part: int
    taken: int


class Mixture:
    """The order of the rows of several datasets. Rows are numbered from those of the first dataset
    on."""

    def __init__(self, parts: Sequence[MixturePart]):
        self.parts = parts
        self._starts = [sum(part.rows for part in parts[:n]) for n in range(len(parts))]
        weights = [Fraction(str(part.weight or part.rows)) for part in parts]
        scale = lcm(*(weight.denominator for weight in weights))
        numbers = [int(weight * scale) for weight in weights]
        common = gcd(*numbers)
        self._schedule = _schedule(tuple(number // common for number in numbers))

    def order(self, seed: int, numbers: Sequence[int]) -> list[int]:
        """Returns the rows that a stage takes as number 0, 1, 2, ... of its rows."""
        rows = []
        for part, taken in map(self._schedule.place, numbers):
            row = datasets.order(seed, self.parts[part].rows, taken, part)
            rows.append(self._starts[part] + row)
        return rows

    def epochs(self, drawn: int) -> dict[str, float]:
        """Returns how many passes over each dataset the first `drawn` rows of a stage make, by
        name."""
        counts = self._schedule.counts(drawn)
        return {
            part.name: count / part.rows for part, count in zip(self.parts, counts, strict=True)
        }


class Schedule:
    """The sequence of datasets that give a row each, by integer weights.

    With N datasets, shares p and d = 1 / (2N - 2), row number j of a dataset (from 1) may come from
    place (j - 1 + d) / p on and comes by place (j - d) / p. Of the rows that may come in a place,
    the one whose last place is the earliest does. The sequence repeats after the sum of the weights.
    """

    def __init__(self, weights: Sequence[int]):
        self._weights = weights
        self._period = sum(weights)
        self._parts = array("I")  # of each place that is known so far, up to a period
        self._places = [array("Q") for _ in weights]  # of each dataset, the places that it gives

    def place(self, number: int) -> Place:
        """Returns which dataset gives row `number`, from 0, and its rows before."""
        periods, place = divmod(number, self._period)
        self._extend(place + 1)
        part = self._parts[place]
        taken = bisect_left(self._places[part], place)
        return Place(part, periods * self._weights[part] + taken)

    def counts(self, drawn: int) -> list[int]:
        """Returns how many of the first `drawn` rows each dataset gives."""
        periods, rest = divmod(drawn, self._period)
        self._extend(rest)
        return [
            periods * weight + bisect_left(places, rest)
            for weight, places in zip(self._weights, self._places, strict=True)
        ]

    def _extend(self, length: int) -> None:
        parts = range(len(self._weights))
        halves = max(1, 2 * len(self._weights) - 2)
        total = self._period
        counts = [len(places) for places in self._places]
        for place in range(len(self._parts) + 1, length + 1):
            due = [
                part
                for part in parts
                if halves * place * self._weights[part] >= (halves * counts[part] + 1) * total
            ]
            part = min(
                due,
                key=lambda part: Fraction(halves * (counts[part] + 1) - 1, self._weights[part]),
            )
            self._places[part].append(place - 1)
            self._parts.append(part)
            counts[part] += 1


@lru_cache(maxsize=8)
def _schedule(weights: tuple[int, ...]) -> Schedule:
    return Schedule(weights)
