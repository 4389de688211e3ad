"""Writes the charts of the page with their titles and legends, and their numbers for the script,
within a size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policy.json_types import JsonValue
from rl.views.report import svg
from rl.views.report.charts import Chart, choose
from rl.views.report.read import RecordedRun
from rl.views.report.series import BUCKETS, Axis, esc, text
from rl.views.report.settings import run_changes

_BYTES = 1_300_000
# Buckets of the headline charts and of the others, tried in this order until the charts fit.
_BUCKETS = (
    (BUCKETS, BUCKETS),
    (BUCKETS, 200),
    (BUCKETS, 100),
    (BUCKETS, 50),
    (200, 50),
    (100, 50),
    (50, 25),
    (25, 12),
)
_MOST_SMALL = 240  # charts of metrics beyond the headline charts; more are named only
_TOOLS = """<div class="tools" hidden><label>smoothing
<input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<label>scale <select id="scale"><option value="auto">automatic</option>
<option value="log">logarithmic</option>
<option value="linear">linear</option></select></label>
<span>drag over a chart to zoom</span><button id="reset" hidden>show all steps</button></div>"""
_BANDS = """<p class="about lead">A point of a curve is the mean of up to {count:,} steps. The band
around it reaches from their lowest to their highest value.</p>"""


@dataclass(frozen=True)
class Figures:
    """html of the section, and numbers: the JSON that the script reads."""

    html: str
    numbers: str


def figures(runs: Sequence[RecordedRun], axis: Axis, against: RecordedRun | None = None) -> Figures:
    """Returns the charts of runs. The more metrics there are, the fewer buckets the charts have."""
    for buckets in _BUCKETS:
        data = svg.Data()
        charts = choose(runs, axis, against, buckets)
        marks = _marks(runs[0], axis) if len(runs) == 1 else {}
        draw = lambda chart: _figure(chart, axis, data, marks, len(runs) == 1)  # noqa: B023, E731
        large = [draw(chart) for chart in charts.headline]
        constant = [chart for chart in charts.other if _constant(chart)]
        changing = [chart for chart in charts.other if not _constant(chart)]
        small = [draw(chart) for chart in changing[:_MOST_SMALL]]
        stages = [
            {"n": each.name, "first": each.first, "last": each.last, "start": each.start}
            for each in axis.stages
        ]
        numbers = as_json(
            {"stages": stages, "restarts": list(marks), "xs": data.xs, "charts": data.charts}
        )
        if sum(map(len, large)) + sum(map(len, small)) + len(numbers) <= _BYTES:
            break
    if not large and not charts.other:
        return Figures("", numbers)
    quiet = (
        f'<p class="quiet">0 at every step, not drawn: {esc(", ".join(charts.zero))}.</p>'
        if charts.zero
        else ""
    )
    count = max(
        (
            int(line.curve.count.max())
            for each in charts.headline
            for line in each.lines
            if len(line.curve.x)
        ),
        default=1,
    )
    bands = _BANDS.format(count=count) if count > 1 else ""
    others = _other(small, constant, changing[_MOST_SMALL:])
    drawn = f'<div class="charts">{"".join(large)}</div>{quiet}{others}'
    return Figures(f'<section id="charts"><h2>Charts</h2>{bands}{_TOOLS}{drawn}</section>', numbers)


def _marks(run: RecordedRun, axis: Axis) -> dict[float, str]:
    """Returns position -> text of the steps that follow a restart or a change of settings."""
    marks: dict[float, str] = {axis.position(*place): "restart" for place in run.restarts}
    for change in run_changes(run):
        first, last = run.steps.get(change.stage, (0, -1))
        if first <= change.step <= last:
            old, new = change.values
            at = axis.position(change.stage, change.step)
            before = [marks[at]] if at in marks else []
            marks[at] = "; ".join([*before, f"{change.key}: {old} -> {new}"])
    return marks


def _other(small: Sequence[str], constant: Sequence[Chart], rest: Sequence[Chart]) -> str:
    """Returns the folded charts of all other metrics, and the names of those that are not drawn."""
    if not small and not constant:
        return ""
    body = f'<div class="charts many">{"".join(small)}</div>'
    if constant:
        values = (
            f"{esc(each.title)} {text(each.lines[0].curve.mean[0])}" for each in constant[:1000]
        )
        body += f'<p class="quiet">Constant, not drawn: {", ".join(values)}.</p>'
    if rest:
        body += (
            f'<p class="quiet">Not drawn: {esc(", ".join(each.title for each in rest[:2000]))}.</p>'
        )
    title = f"All other metrics ({len(small) + len(constant) + len(rest)})"
    return (
        f'<details class="fold"><summary>{title}</summary><div class="body">{body}</div></details>'
    )


def _constant(chart: Chart) -> bool:
    """Tells whether all values of a chart are equal and finite."""
    curves = [line.curve for line in chart.lines]
    ends = [
        each for curve in curves if len(curve.x) for each in (curve.low.min(), curve.high.max())
    ]
    return len(set(ends)) == 1 and not any(len(curve.lost) for curve in curves)


def _figure(
    chart: Chart, axis: Axis, data: svg.Data, marks: Mapping[float, str], single: bool
) -> str:
    """Returns a chart with its title, last value and legend. single: the page shows one run."""
    ink = svg.draw(chart, axis, data.add(chart), marks)
    own = [line for line in chart.lines if not line.reference and len(line.curve.x)]
    unit = f" {chart.unit}" if chart.unit else ""
    now = ""
    if own and single:
        last = sum(line.curve.mean[-1] for line in own) if chart.stacked else own[0].curve.mean[-1]
        label = "" if chart.small else '<span class="note">last</span> '
        now = f'<span class="now">{label}{text(last)}{unit}</span>'
    elif unit:
        now = f'<span class="note">{unit}</span>'
    note = f'<span class="note wide">{esc(chart.note)}</span>' if chart.note else ""
    title = f'<span class="title{" mono" if chart.small else ""}">{esc(chart.title)}</span>'
    legend = "" if chart.small and len(chart.lines) == 1 else _legend(chart)
    return (
        '<figure class="card" '
        f'id="{esc("chart-" + chart.key)}"><figcaption>{title}{now}{note}</figcaption>'
        f'<div class="frame">{ink}</div>{legend}</figure>'
    )


def _legend(chart: Chart) -> str:
    """Returns the names of the lines with their last values, the limits, and what unusual marks
    mean."""
    entries = []
    if len(chart.lines) > 1:
        for line in chart.lines:
            dot = "dash" if line.reference else f"t{line.tone % svg.TONES}"
            last = (
                f" <b>{text(line.curve.mean[-1])}</b>"
                if len(line.curve.x) and not chart.small
                else ""
            )
            entries.append(f'<span><span class="dot {dot}"></span>{esc(line.label)}{last}</span>')
    entries += [
        f'<span><span class="dot dash lim"></span>{text(value)}: {esc(label)}</span>'
        for value, label in chart.limits
    ]
    if chart.stacked and (scale := svg.scale_of(chart)).clipped:
        own = [line.curve.mean for line in chart.lines if not line.reference]
        top = max(sum(each) for each in zip(*own, strict=True))
        entries.append(
            f"<span>marks at the top: steps above {text(scale.high)} s, up to {text(top)} s</span>"
        )
    if any(
        line.low is not None and not line.metric.startswith(("eval/", "held_out/"))
        for line in chart.lines
    ):
        entries.append("<span>pale band: one standard deviation</span>")
    if count := sum(len(line.curve.lost) for line in chart.lines):
        entries.append(f"<span>marks at the bottom: {count:,} values that are not finite</span>")
    return f'<div class="legend">{"".join(entries)}</div>' if entries else ""


def as_json(value: JsonValue) -> str:
    """Returns JSON that cannot end the script element that holds it."""
    shown = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    shown = shown.encode("utf-8", "replace").decode()
    return shown.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
