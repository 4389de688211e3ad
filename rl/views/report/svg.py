"""Draws a chart as SVG, readable without a script, and gives the script the numbers to draw it
again.

The outer SVG has no viewBox: labels keep their size at any width. The inner one stretches the
paths. Colours are classes of report.css. Coordinates of paths are integers and relative, which
keeps a chart near 5 kB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from policy.json_types import JsonValue
from rl.views.report.charts import Chart, DrawnChart
from rl.views.report.series import Axis, Curve, esc, is_log, nice_step, text, ticks

WIDTH = 2000
HEIGHT = 1000
TONES = 7  # colours of report.css
_X_TICKS = 6
_CHARACTER = 0.018  # width of a character of a stage's name, as a share of a narrow chart


@dataclass(frozen=True)
class Scale:
    """A value axis from `low` to `high`. clipped: whether larger values exist."""

    low: float
    high: float
    log: bool
    clipped: bool = False

    def y(self, values: np.ndarray | float) -> np.ndarray:
        """Returns heights from the top, 0..HEIGHT, as integers."""
        low, high = (
            (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        )
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            shown = (
                np.log10(np.maximum(values, self.low)) if self.log else np.asarray(values, float)
            )
            return np.rint(np.clip((high - shown) / (high - low), -1, 2) * HEIGHT).astype(np.int64)


def scale_of(chart: Chart) -> Scale:
    """Returns the value axis that holds all values, bands and limits of a chart.

    Areas on each other have a bound at 1.5 times their 98th percentile: a step that compiles takes
    100 times as long.
    """
    if chart.stacked:
        total = np.sum([line.curve.mean for line in chart.lines if not line.reference], axis=0)
        top = float(total.max()) if len(total) else 1.0
        bound = (
            1.5 * float(np.percentile(total[2:] if len(total) > 20 else total, 98))
            if len(total)
            else 1.0
        )
        clipped = top > 2 * bound > 0
        return Scale(0.0, (bound if clipped else top * 1.04) or 1.0, False, clipped)
    lows = [
        part
        for line in chart.lines
        for part in (line.curve.low, line.low)
        if part is not None and len(part)
    ]
    highs = [
        part
        for line in chart.lines
        for part in (line.curve.high, line.high)
        if part is not None and len(part)
    ]
    if not highs:
        return Scale(0.0, 1.0, False)
    limits = [value for value, _ in chart.limits]
    data_low = min(float(each.min()) for each in lows)
    data_high = max(float(each.max()) for each in highs)
    low = min([data_low, *limits])
    high = max([data_high, *limits])
    if is_log(low, high) or (chart.log and low > 0 and high > low):
        return Scale(low / 1.15, high * 1.15, True)
    if chart.share and low >= 0 and high <= 1:
        return Scale(0.0, 1.0 if high > 0.5 or not high else high * 1.1, False)
    if 0 <= low < 0.5 * high:
        low = 0.0
    elif high <= 0 and 0.5 * low < high:
        high = 0.0
    space = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Scale(
        low - space if low else 0.0, high + space if high else (0.0 if low else 1.0), False
    )


def draw(
    chart: Chart, axis: Axis, number: int | None, marks: Mapping[float, str] = MappingProxyType({})
) -> str:
    """Returns the SVG of a chart. number: its index in the data of the script; None: it has none.
    marks: position -> text of vertical lines."""
    scale = scale_of(chart)
    data = "" if number is None else f' data-c="{number}"'
    kind = "plot" + " small" * chart.small + " stacked" * chart.stacked
    return (
        f'<svg class="{kind}" role="img" aria-label="{esc(description(chart))}"{data}>'
        f"{_grid(scale, 2 if chart.small else 4)}{_steps(chart, axis, marks)}"
        f'<svg class="ink" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" width="100%" '
        'height="100%">'
        f"{_ink(chart, scale)}</svg></svg>"
    )


def description(chart: Chart) -> str:
    """Describes a chart in a sentence for each line, for readers who do not see it."""
    parts = []
    for line in chart.lines[:TONES]:
        shown = line.curve
        if not len(shown.x):
            parts.append(f"{line.label}: no finite value")
            continue
        where = f"{line.label}: first {text(shown.mean[0])}, last {text(shown.mean[-1])}"
        parts.append(f"{where}, lowest {text(shown.low.min())}, highest {text(shown.high.max())}")
    return f"{chart.title}. " + "; ".join(parts)


def _grid(scale: Scale, count: int) -> str:
    marks = []
    for value in ticks(scale.low, scale.high, scale.log, count):
        y = _percent(float(scale.y(value)) / HEIGHT)
        label = text(value) if scale.log or abs(value) > 1e-12 * scale.high else "0"
        marks.append(
            f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/><text x="-7" y="{y}" '
            f'dy=".32em">{esc(label)}</text>'
        )
    return f'<g class="grid">{"".join(marks)}</g>'


def _steps(chart: Chart, axis: Axis, marked: Mapping[float, str]) -> str:
    """Draws ticks of steps, boundaries of stages, restarts and changes."""
    width = chart.last - chart.first
    step = max(1, round(nice_step(width, 3 if chart.small else _X_TICKS)))
    marks = []
    visible = [each for each in axis.stages if each.end > chart.first and each.start < chart.last]
    for stage in visible:
        for local in range(math.ceil(stage.first / step) * step, stage.last + 1, step):
            share = (stage.start + local - stage.first - chart.first) / width
            end = (stage.end - chart.first) / width
            near = (
                stage is not visible[-1] and end - share < 0.06
            )  # leaves room for the next stage's first tick
            if -1e-9 <= share <= 1 + 1e-9 and not near:
                marks.append(f'<text x="{_percent(share)}" y="100%" dy="16">{local:,}</text>')
        if stage.start > chart.first:
            x = _percent((stage.start - chart.first) / width)
            marks.append(f'<line class="stage" x1="{x}" x2="{x}" y1="0" y2="100%"/>')
        room = (stage.end - max(stage.start, chart.first)) / width
        if (
            len(visible) > 1
            and not chart.small
            and (room > _CHARACTER * len(stage.name) or stage is visible[-1])
        ):
            x = _percent((max(stage.start, chart.first) - chart.first) / width)
            marks.append(
                f'<text class="stage" x="{x}" dx="1" y="0" dy="-5">{esc(stage.name)}</text>'
            )
    for x, title in marked.items():
        if chart.first < x < chart.last:
            at = _percent((x - chart.first) / width)
            marks.append(
                f'<line class="restart" x1="{at}" x2="{at}" y1="0" '
                f'y2="100%"><title>{esc(title)}</title></line>'
            )
    return f'<g class="steps">{"".join(marks)}</g>'


def _ink(chart: Chart, scale: Scale) -> str:
    factor = WIDTH / (chart.last - chart.first)
    place = lambda x: np.rint((x - chart.first) * factor).astype(np.int64)  # noqa: E731
    parts = []
    if chart.stacked:
        parts += _areas(chart, scale, place)
    else:
        for line in chart.lines:
            tone = line.tone % TONES
            x = place(line.curve.x)
            if line.low is not None and line.high is not None:
                parts.append(
                    f'<path class="b b{tone} wide" '
                    f'd="{_band(line.curve, x, line.low, line.high, scale)}"/>'
                )
            if line.curve.bucketed and not line.reference:
                band = _band(line.curve, x, line.curve.low, line.curve.high, scale)
                parts.append(f'<path class="b b{tone}" d="{band}"/>')
        for line in sorted(chart.lines, key=lambda each: (not each.reference, -each.tone)):
            tone = line.tone % TONES
            x = place(line.curve.x)
            y = scale.y(line.curve.mean)
            kind = "l ref" if line.reference else f"l l{tone}"
            parts.append(f'<path class="{kind}" d="{_path(line.curve, x, y)}"/>')
            if line.dots:
                points = "".join(f"M{a} {b}h0" for a, b in zip(x, y, strict=True))
                parts.append(f'<path class="d l{tone}" d="{points}"/>')
    for value, _ in chart.limits:
        parts.append(f'<path class="limit" d="M0 {int(scale.y(value))}h{WIDTH}"/>')
    lost = np.unique(place(np.concatenate([line.curve.lost for line in chart.lines])))
    if len(lost):
        parts.append(f'<path class="lost" d="{"".join(f"M{x} {HEIGHT}v-40" for x in lost)}"/>')
    return "".join(parts)


def _areas(chart: Chart, scale: Scale, place: Callable[[np.ndarray], np.ndarray]) -> list[str]:
    shown = [line for line in chart.lines if not line.reference]
    below = np.zeros(len(shown[0].curve.x))
    parts = []
    for line in shown:
        above = below + line.curve.mean
        band = _band(line.curve, place(line.curve.x), below, above, scale)
        parts.append(f'<path class="a a{line.tone % TONES}" d="{band}"/>')
        below = above
    parts += [
        '<path class="l ref" '
        f'd="{_path(line.curve, place(line.curve.x), scale.y(line.curve.mean))}"/>'
        for line in chart.lines
        if line.reference
    ]
    if scale.clipped:
        over = place(shown[0].curve.x[below > scale.high])
        parts.append(f'<path class="over" d="{"".join(f"M{x} 0v60" for x in over)}"/>')
    return parts


def _spans(shown: Curve) -> Iterable[slice]:
    """Yields the parts of a curve that are connected: one for each stage."""
    edges = np.flatnonzero(shown.stage[1:] != shown.stage[:-1]) + 1
    bounds = [0, *edges.tolist(), len(shown.x)]
    return [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if b > a]


def _path(shown: Curve, x: np.ndarray, y: np.ndarray) -> str:
    return "".join(_move(x[part], y[part]) for part in _spans(shown))


def _band(shown: Curve, x: np.ndarray, low: np.ndarray, high: np.ndarray, scale: Scale) -> str:
    top = scale.y(high)
    bottom = scale.y(low)
    parts = []
    for part in _spans(shown):
        around = np.r_[top[part], bottom[part][::-1]]
        parts.append(_move(np.r_[x[part], x[part][::-1]], around) + "z")
    return "".join(parts)


def _move(x: np.ndarray, y: np.ndarray) -> str:
    """Returns a path through points: absolute start, then relative lines."""
    dx = np.diff(x).tolist()
    dy = np.diff(y).tolist()
    rest = "".join(f"{a}{b}" if b < 0 else f"{a} {b}" for a, b in _spaced(dx, dy))
    return f"M{x[0]} {y[0]}" + (f"l{rest.strip()}" if rest else "")


def _spaced(dx: list[int], dy: list[int]) -> Iterable[tuple[str, int]]:
    """Yields each pair with the space that its first number needs: a minus sign separates
    already."""
    return ((str(a) if a < 0 else f" {a}", b) for a, b in zip(dx, dy, strict=True))


def _percent(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".") + "%"


class Data:
    """The numbers of the charts, for the script: equal lists of positions are stored once."""

    def __init__(self) -> None:
        self.xs: list[list[float]] = []
        self.charts: list[dict[str, JsonValue]] = []
        self._index: dict[tuple[float, ...], int] = {}

    def add(self, chart: Chart) -> int:
        """Adds a chart and returns its index."""
        self.charts.append(
            {
                "f": chart.first,
                "l": chart.last,
                "log": scale_of(chart).log,
                "share": chart.share,
                "stack": chart.stacked,
                "small": chart.small,
                "lim": [value for value, _ in chart.limits],
                "s": [self._line(line) for line in chart.lines],
            }
        )
        return len(self.charts) - 1

    def _line(self, line: DrawnChart) -> dict[str, JsonValue]:
        shown = line.curve
        x = tuple(round(float(each), 1) for each in shown.x)
        if x not in self._index:
            self._index[x] = len(self.xs)
            self.xs.append([int(each) if each == int(each) else each for each in x])
        entry: dict[str, JsonValue] = {
            "n": line.label,
            "t": line.tone % TONES,
            "x": self._index[x],
            "y": numbers(shown.mean),
            "g": (np.flatnonzero(shown.stage[1:] != shown.stage[:-1]) + 1).tolist(),
        }
        if shown.bucketed:
            entry |= {
                "lo": numbers(shown.low),
                "hi": numbers(shown.high),
                "c": int(shown.count.max()),
            }
        if line.low is not None and line.high is not None:
            entry |= {"bl": numbers(line.low), "bh": numbers(line.high)}
        if len(shown.lost):
            entry["lost"] = sorted({int(each) for each in shown.lost})[: len(x) + 400]
        entry |= {"e": 1} if line.metric.startswith(("eval/", "held_out/")) else {}
        return entry | ({"d": 1} if line.dots else {}) | ({"r": 1} if line.reference else {})


def numbers(values: np.ndarray) -> list[float]:
    """Returns numbers of four digits: the JSON of a float is its shortest text."""
    return [
        int(short) if (short := float(f"{each:.4g}")) == int(short) and abs(short) < 1e6 else short
        for each in values.tolist()
    ]
