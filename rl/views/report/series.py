"""Turns metrics into curves: one axis of steps for all stages and runs, buckets, ticks,
texts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.views.report.read import Metric, RecordedRun

BUCKETS = 400
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Stage:
    """A stage on the axis: its recorded steps first .. last, and the position of its first step."""

    name: str
    first: int
    last: int
    start: int

    @property
    def end(self) -> int:
        """The place of the last step on the axis of the chart, which goes on over all stages."""
        return self.start + self.last - self.first


@dataclass(frozen=True)
class Axis:
    """The steps of all stages, one after the other. The last step of a stage and step 0 of the next
    coincide."""

    stages: tuple[Stage, ...]

    def position(self, stage: str, step: int) -> int:
        """Returns the position of a step."""
        home = next(each for each in self.stages if each.name == stage)
        return home.start + step - home.first

    def positions(self, run: RecordedRun, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
        """Returns (position, index of the stage on the axis) of each value of a metric, int[n]
        each."""
        index = {each.name: number for number, each in enumerate(self.stages)}
        stage = np.asarray([index[name] for name in run.stages], np.int64)[metric.stage]
        shift = np.asarray([each.start - each.first for each in self.stages], np.int64)
        return metric.step + shift[stage], stage


def axis(runs: Sequence[RecordedRun]) -> Axis:
    """Returns the axis of these runs. Stages of equal names share a place, as long as the longest
    of them."""
    names: list[str] = []
    for run in runs:
        names += [name for name in run.stages if name not in names]
    stages = []
    start = 0
    for name in names:
        spans = [run.steps[name] for run in runs if name in run.steps]
        stages.append(
            Stage(name, min(first for first, _ in spans), max(last for _, last in spans), start)
        )
        start = stages[-1].end
    return Axis(tuple(stages))


@dataclass(frozen=True)
class Curve:
    """A metric in buckets of steps, n of them, those without a finite value left out.

    x: float[n], mean position; mean, low, high: float[n], of the finite values; count: int[n],
    values in a bucket; stage: int[n], index on the axis: a line has a gap where it changes; lost:
    float[m], positions of values that are not finite.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    stage: np.ndarray
    lost: np.ndarray

    @property
    def bucketed(self) -> bool:
        """Whether a bucket holds more than one value."""
        return bool(len(self.count) and self.count.max() > 1)


def curve(x: np.ndarray, stage: np.ndarray, value: np.ndarray, count: int = BUCKETS) -> Curve:
    """Makes at most `count` buckets (and one more for each further stage) of equal width in steps.

    x, stage: int[n], ascending; value: float[n], NaN where there is none. With at most `count`
    values each is a bucket.
    """
    finite = np.isfinite(value)
    lost = x[~finite]
    x = x[finite]
    stage = stage[finite]
    value = value[finite]
    if len(x) <= count:
        ones = np.ones(len(x), np.int64)
        return Curve(x.astype(float), value, value, value, ones, stage, lost.astype(float))
    width = x[-1] - x[0] + 1
    bucket = ((x - x[0]) * count // width) * (int(stage.max()) + 1) + stage
    starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
    sizes = np.diff(np.r_[starts, len(x)])
    with np.errstate(over="ignore"):
        mean = np.add.reduceat(value, starts) / sizes
    low = np.minimum.reduceat(value, starts)
    high = np.maximum.reduceat(value, starts)
    position = np.add.reduceat(x, starts) / sizes
    return Curve(
        position, np.clip(mean, low, high), low, high, sizes, stage[starts], lost.astype(float)
    )


def nice_step(width: float, count: int) -> float:
    """Returns the step 1, 2 or 5 times a power of ten that divides `width` into at most `count`
    parts."""
    if not width > 0 or not math.isfinite(width):
        return 1.0
    rough = width / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        (power * factor for factor in (1, 2, 5) if power * factor >= rough * (1 - 1e-9)), power * 10
    )


def ticks(low: float, high: float, log: bool = False, count: int = 4) -> list[float]:
    """Returns the ticks of a value axis: nice numbers within low .. high; on a log scale powers of
    ten."""
    if log:
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (count + 1)))
        return [10.0**power for power in range(first, last + 1, every)]
    step = nice_step(high - low, count)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)][
        : count + 3
    ]


def is_log(low: float, high: float) -> bool:
    """Tells whether a scale is logarithmic by default: all values positive, and the largest 1000
    times the smallest."""
    return low > 0 and high / low >= 1000


def text(value: float | None) -> str:
    """Returns a number for people: 4,940 and 12.3M and 0.918 and 7.1e-06."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 5e-4:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+", "e")
    for limit, factor, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M")):
        if size >= limit:
            return f"{value / factor:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(size))) if size >= 1 else 3
    shown = f"{value:.{min(digits, 3)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def seconds_text(seconds: float | None) -> str:
    """Returns a duration: 41 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.2g} s"
    rounded = round(seconds)
    for unit, size, small, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if rounded >= size:
            rest = rounded % size // part
            return f"{rounded // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{rounded} s"


def esc(value: object) -> str:
    """Escapes a text for HTML. Control characters are shown by their pictures; half a surrogate
    pair becomes ?."""
    clean = str(value).encode("utf-8", "replace").decode()
    return html.escape(_CONTROL.sub(lambda match: chr(0x2400 + min(ord(match[0]), 33)), clean))
