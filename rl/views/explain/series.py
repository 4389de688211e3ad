"""Measures the level and the trend of one metric over the steps of a stage, robust against single
spikes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

TREND_STEPS = 6
"""Fewest values that have a trend. A rank correlation of 0.6 or more occurs by chance in 1 of 8
series of 6, and in 1 of 400 series of 20; so a trend alone never raises an alarm, and every rule
also asks for a size."""


@dataclass(frozen=True)
class Series:
    """Finite values of a metric, in the order of the steps. It may be empty."""

    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def window(self) -> int:
        """Number of values at either end that `first` and `last` look at: a fifth, 2 to 20."""
        return max(1, min(len(self), max(2, min(20, len(self) // 5))))

    @property
    def first(self) -> float:
        """The median of the first `window` values."""
        return median(self.values[: self.window])

    @property
    def last(self) -> float:
        """The median of the last `window` values."""
        return median(self.values[-self.window :])

    @property
    def largest(self) -> float:
        return max(self.values)

    @property
    def smallest(self) -> float:
        return min(self.values)

    @property
    def typical(self) -> float:
        """The median of all values: what the series is like most of the time."""
        return median(self.values)

    def share(self, accept: Callable[[float], bool]) -> float:
        """Returns the share of the values that `accept` accepts; 0 without values."""
        return sum(map(accept, self.values)) / len(self) if self else 0.0

    def since(self, accept: Callable[[float], bool]) -> int | None:
        """Returns the step from which on most values are accepted, or None.

        Most: three in four of the values from there to the end, the value of that step among them.
        """
        accepted = [bool(accept(value)) for value in self.values]
        good = 0
        first = None
        for back, place in enumerate(range(len(self) - 1, -1, -1), start=1):
            good += accepted[place]
            if accepted[place] and good >= 0.75 * back:
                first = self.steps[place]
        return first

    def rank_correlation(self) -> float:
        """Returns Spearman's correlation of the values with time, -1 to 1; 0 for fewer than
        TREND_STEPS values."""
        if len(self) < TREND_STEPS:
            return 0.0
        return correlation(list(range(len(self))), ranks(self.values))

    def rises(self, correlation_at_least: float = 0.6) -> bool:
        """Tells whether the values rise steadily."""
        return self.rank_correlation() >= correlation_at_least

    def falls(self, correlation_at_least: float = 0.6) -> bool:
        """Tells whether the values fall steadily."""
        return self.rank_correlation() <= -correlation_at_least


def ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            result[place] = (start + end) / 2
        start = end + 1
    return result


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Pearson's correlation; 0 where one side is constant."""
    n = len(first)
    if n < 2:
        return 0.0
    a = sum(first) / n
    b = sum(second) / n
    x = [value - a for value in first]
    y = [value - b for value in second]
    size = (sum(value * value for value in x) * sum(value * value for value in y)) ** 0.5
    return sum(p * q for p, q in zip(x, y, strict=True)) / size if size > 0 else 0.0
