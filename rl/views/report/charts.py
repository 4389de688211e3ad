"""Makes the charts of one or several runs: the headline charts in their order, then every other
metric."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl.statistics import wilson
from rl.views.report.plans import ACCURACY, PLANS, ChartLine, ChartPlan
from rl.views.report.read import Metric, RecordedRun, evaluation_problems
from rl.views.report.series import BUCKETS, Axis, Curve, curve

_MOST_STEPS = 2**40
_FUNCTIONS = 6  # reward functions, or sources, in one chart


@dataclass(frozen=True)
class DrawnChart:
    """A line of a chart. low, high: float[n], the band of a deviation or an interval, or None;
    dots: a mark at each value. tone: number of its colour. reference: a run to compare with, drawn
    thin."""

    label: str
    metric: str
    curve: Curve
    tone: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dots: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines with one scale. limits: (value, label) of horizontal lines. first, last: positions on
    the axis."""

    key: str
    title: str
    note: str
    lines: tuple[DrawnChart, ...]
    first: float
    last: float
    limits: tuple[tuple[float, str], ...] = ()
    share: bool = False
    stacked: bool = False
    log: bool = False
    unit: str = ""
    small: bool = False


@dataclass
class Charts:
    """headline and other charts, and the titles of headline charts that are 0 at every step."""

    headline: list[Chart] = field(default_factory=list)
    other: list[Chart] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)


def choose(
    runs: Sequence[RecordedRun],
    axis: Axis,
    against: RecordedRun | None = None,
    buckets: tuple[int, int] = (BUCKETS, BUCKETS),
) -> Charts:
    """Returns the charts of one run with all their lines, or of several with the first line of each
    chart per run.

    against: a run whose first lines are drawn as a reference. buckets: of the headline charts, and
    of the others.
    """
    result = Charts()
    drawn = set()
    for plan in [_filled(each, runs) for each in PLANS]:
        shown = plan if len(runs) == 1 else _one_line(plan, runs)
        lines = tuple(_lines(shown, runs, axis, against, buckets[0]))
        drawn |= {line.metric for line in plan.lines} | {line.metric for line in lines}
        drawn |= {line.deviation for line in plan.lines if line.deviation}
        if not lines:
            continue
        if plan.quiet and all(
            not line.curve.high.any() and not line.curve.low.any() for line in lines
        ):
            result.zero.append(plan.title.lower())
            continue
        first, last = _span(axis, [line.curve for line in lines])
        result.headline.append(
            Chart(
                *(plan.key, plan.title, plan.note, lines, first, last),
                limits=_limits(plan, runs),
                share=plan.share,
                stacked=shown.stacked,
                log=plan.log,
                unit=plan.unit,
            )
        )
    for name in sorted({name for run in runs for name in run.metrics} - drawn):
        plan = ChartPlan(name, name, "", (ChartLine(name, name),))
        lines = tuple(_lines(plan, runs, axis, against, buckets[1]))
        if lines:
            first, last = _span(axis, [line.curve for line in lines])
            result.other.append(Chart(name, name, "", lines, first, last, small=True))
    return result


def _filled(plan: ChartPlan, runs: Sequence[RecordedRun]) -> ChartPlan:
    """Adds the lines whose metrics have names that depend on the run."""
    names = sorted({name for run in runs for name in run.metrics})
    if plan.key == "parts":
        parts = [each[1] for name in names if (each := re.fullmatch(r"rewards/(.+)/mean", name))]
        lines = (
            tuple(ChartLine(f"rewards/{each}/mean", each) for each in parts[:_FUNCTIONS])
            if len(parts) > 1
            else ()
        )
    elif plan.key == "sources":
        lines = _by_source(names)
    elif plan.key == "evaluation":
        matches = [re.fullmatch(r"eval/(pass|maj)@(\d+)", name) for name in names]
        ks = sorted((each[1] == "maj", int(each[2]), each[0]) for each in matches if each)
        lines = (*plan.lines, *(ChartLine(name, name[5:]) for *_, name in ks))
    elif plan.key == "memory":
        lines = tuple(
            ChartLine(name, name.partition("/")[2]) for name in names if name.startswith("memory/")
        )
    else:
        return plan
    return replace(plan, lines=lines)


def _by_source(names: Sequence[str]) -> tuple[ChartLine, ...]:
    """Returns a line for each source: its mean reward, else its loss."""
    for metric in ("reward_mean", "nll"):
        sources = [
            each[1] for name in names if (each := re.fullmatch(rf"source/(.+)/{metric}", name))
        ]
        if sources:
            return tuple(
                ChartLine(f"source/{each}/{metric}", each) for each in sources[:_FUNCTIONS]
            )
    return ()


def _one_line(plan: ChartPlan, runs: Sequence[RecordedRun]) -> ChartPlan:
    """Returns the chart that compares runs: its first metric that one of them has; for parts of a
    step, their sum."""
    if plan.stacked:
        lines: tuple[ChartLine, ...] = (ChartLine("time/step", "time/step"),)
    else:
        lines = tuple(
            line for line in plan.lines if any(line.metric in run.metrics for run in runs)
        )[:1]
    return replace(plan, lines=lines, stacked=False)


def _lines(
    plan: ChartPlan,
    runs: Sequence[RecordedRun],
    axis: Axis,
    against: RecordedRun | None = None,
    buckets: int = BUCKETS,
) -> Iterator[DrawnChart]:
    tone = 0
    runs = [_complete(run, plan) for run in runs] if plan.stacked else runs
    for number, run in enumerate(runs):
        for line in plan.lines:
            if line.metric in run.metrics:
                shown = line if len(runs) == 1 else ChartLine(line.metric, run.name)
                yield _drawn(
                    shown, run, axis, number if len(runs) > 1 else tone, buckets, plan.stacked
                )
                tone += 1
    if against is not None:
        line = ChartLine("time/step", "") if plan.stacked else plan.lines[0] if plan.lines else None
        if line and line.metric in against.metrics and tone:
            shown = _drawn(
                ChartLine(line.metric, against.name), against, axis, 0, buckets, bare=True
            )
            yield replace(shown, reference=True)


def _complete(run: RecordedRun, plan: ChartPlan) -> RecordedRun:
    """Returns the run with the parts of its steps at equal steps; a part that a step lacks is 0."""
    parts = {
        line.metric: run.metrics[line.metric] for line in plan.lines if line.metric in run.metrics
    }
    if not parts:
        return run
    every = np.unique(np.concatenate([_step_number(each) for each in parts.values()]))
    filled = {}
    for name, each in parts.items():
        value = np.zeros(len(every))
        value[np.searchsorted(every, _step_number(each))] = np.nan_to_num(each.value)
        filled[name] = Metric(every // _MOST_STEPS, every % _MOST_STEPS, value)
    used = {name: each for name, each in filled.items() if each.value.any()} or filled
    others = {name: each for name, each in run.metrics.items() if name not in parts}
    return replace(run, metrics=others | used)


def _step_number(metric: Metric) -> np.ndarray:
    """Returns one number for each (stage, step), in their order."""
    return metric.stage * _MOST_STEPS + metric.step


def _drawn(
    line: ChartLine, run: RecordedRun, axis: Axis, tone: int, buckets: int, bare: bool
) -> DrawnChart:
    """Returns a line of a chart. bare: without bands and dots."""
    metric = run.metrics[line.metric]
    x, stage = axis.positions(run, metric)
    result = curve(x, stage, metric.value, buckets)
    low = high = None
    if bare:
        return DrawnChart(line.label, line.metric, result, tone)
    if line.metric == ACCURACY or line.metric.startswith(("eval/pass@", "eval/maj@")):
        if (problems := _problems(run, result, axis)) is not None:
            low, high = wilson(result.mean, problems)
        return DrawnChart(
            line.label, line.metric, result, tone, low, high, dots=len(result.x) <= 60
        )
    if line.deviation in run.metrics:
        other = run.metrics[line.deviation]
        same = np.isin(_step_number(other), _step_number(metric)[np.isfinite(metric.value)])
        spread = curve(*axis.positions(run, other), np.where(same, other.value, np.nan), buckets)
        if len(spread.x) == len(result.x):
            low = result.mean - spread.mean
            high = result.mean + spread.mean
    return DrawnChart(line.label, line.metric, result, tone, low, high, dots=len(result.x) <= 2)


def _problems(run: RecordedRun, shown: Curve, axis: Axis) -> np.ndarray | float | None:
    """Returns the number of scored problems of each evaluation, from the events, or of all from the
    configuration."""
    if (metric := run.metrics.get("eval/problems")) is not None and np.isfinite(metric.value).any():
        x, _ = axis.positions(run, metric)
        scored = metric.value
        unscored = run.metrics.get("eval/unscored")
        if unscored is not None and len(unscored.value) == len(scored):
            scored = scored - unscored.value
        return np.interp(shown.x, x[np.isfinite(scored)], scored[np.isfinite(scored)])
    return evaluation_problems(run)


def _span(axis: Axis, curves: Sequence[Curve]) -> tuple[float, float]:
    """Returns the first and last position of the stages in which these curves have values."""
    stages = {int(number) for each in curves for number in np.unique(each.stage)}
    lost = [float(x) for each in curves for x in each.lost]
    first = min([*lost, *(axis.stages[number].start for number in stages)], default=0)
    last = max([*lost, *(axis.stages[number].end for number in stages)], default=0)
    return float(first), float(max(last, first + 1))


def _limits(plan: ChartPlan, runs: Sequence[RecordedRun]) -> tuple[tuple[float, str], ...]:
    """Returns the bounds that docs/metrics.md and the configuration name for a chart."""
    if plan.key != "mismatch":
        return ()
    config = runs[0].config
    stages = config.get("stages")
    bounds = (
        [each.get("max_logp_diff") for each in stages if isinstance(each, dict)]
        if isinstance(stages, list)
        else []
    )
    limits = [
        (float(each), "max_logp_diff")
        for each in dict.fromkeys(bounds)
        if isinstance(each, (int, float))
    ]
    model = config.get("model")
    if isinstance(model, dict) and model.get("dtype") == "float32":
        return (*limits, (1e-4, "float32: above is a fault"))
    return (*limits, (0.05, "mean above: set a correction"))
