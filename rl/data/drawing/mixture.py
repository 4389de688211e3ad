"""Which of several datasets gives the next row, by weight.

It follows from the weights and the number of the row alone: after any number of rows, each dataset
has given its share of them to within one row (R. Tijdeman, The chairman assignment problem, 1980).
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


def mixture(weights: Sequence[float]) -> Mixture:
    """Returns the sequence of datasets with these weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * scale) for weight in exact]
    common = gcd(*numbers)
    return _mixture(tuple(number // common for number in numbers))


class Mixture:
    """The sequence of datasets that give a row each, by integer weights.

    With N datasets, shares p and d = 1 / (2N - 2), row number j of a dataset (from 1) may come from
    place (j - 1 + d) / p on and comes by place (j - d) / p. Of the rows that may come in a place,
    the one whose last place is the earliest does. The sequence repeats after the sum of the
    weights.
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
def _mixture(weights: tuple[int, ...]) -> Mixture:
    return Mixture(weights)
