"""Reduces runs to their headline numbers, and writes the tables of `rl compare --text`.

Headline numbers are the first, last and best value of each metric, the evaluations, and the time to
each accuracy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from policy.json_types import JsonValue
from rl.records.run_files import Attempt
from rl.statistics import wilson
from rl.views.report import settings
from rl.views.report.plans import ACCURACY, BETTER, HEADLINES
from rl.views.report.read import Metric, RecordedRun, evaluation_problems
from rl.views.report.series import Axis, curve, seconds_text, text

CODES = {
    0: "done",
    1: "a bug",
    2: "error in the configuration",
    3: "error in the data",
    4: "error in the model",
    5: "not enough resources",
    6: "stopped by a reward",
    75: "interrupted, can continue",
    76: "lost a process",
    130: "stopped by Ctrl-C",
}


@dataclass(frozen=True)
class RecordedValue:
    """A value of a metric, and the step of a stage that it is of."""

    value: float
    stage: str
    step: int


@dataclass(frozen=True)
class Headline:
    """First, last and best finite value of a metric. best is None without a direction."""

    metric: str
    first: RecordedValue
    last: RecordedValue
    best: RecordedValue | None


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation. interval: 95% bounds of the accuracy, or None if the number of problems is
    unknown.

    passes maps k to (pass@k, lower, upper); others holds the further metrics by name.
    """

    stage: str
    step: int
    accuracy: float
    interval: tuple[float, float] | None
    problems: int | None
    reward: float | None
    passes: dict[int, tuple[float, float | None, float | None]] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)


def headline(run: RecordedRun, name: str) -> Headline | None:
    """Summarises a metric: an evaluation over all stages, any other over the last stage that has
    it."""
    metric = run.metrics.get(name)
    if metric is None:
        return None
    use = np.isfinite(metric.value)
    if use.any() and not name.startswith("eval/"):
        use &= metric.stage == metric.stage[use][-1]
    rows = np.flatnonzero(use)
    if not len(rows):
        return None
    best = None
    if name in BETTER or name.startswith("eval/"):
        sign = -1 if BETTER.get(name) == "down" else 1
        best = _at(run, metric, int(rows[np.argmax(sign * metric.value[rows])]))
    return Headline(name, _at(run, metric, int(rows[0])), _at(run, metric, int(rows[-1])), best)


def headlines(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the names of the headline metrics that a run has, in the order of the page."""
    names = {name for run in runs for name in run.metrics}
    passes = sorted(name for name in names if name.startswith("eval/pass@"))
    ordered = [
        name for each in HEADLINES for name in ((each, *passes) if each == ACCURACY else (each,))
    ]
    return [name for name in ordered if name in names]


def _at(run: RecordedRun, metric: Metric, row: int) -> RecordedValue:
    stage = run.stages[int(metric.stage[row])]
    return RecordedValue(float(metric.value[row]), stage, int(metric.step[row]))


def evaluations(run: RecordedRun) -> list[EvaluationSummary]:
    """Returns every evaluation of the run, in order."""
    names = [name for name in run.metrics if name.startswith("eval/")]
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name in names:
        metric = run.metrics[name]
        for stage, step, value in zip(
            metric.stage.tolist(), metric.step.tolist(), metric.value.tolist(), strict=True
        ):
            rows.setdefault((stage, step), {})[name] = value
    return [_evaluation(run, *place, values) for place, values in sorted(rows.items())]


def _evaluation(
    run: RecordedRun, stage: int, step: int, values: dict[str, float]
) -> EvaluationSummary:
    recorded = values.pop("eval/problems", math.nan)
    problems = int(recorded) if math.isfinite(recorded) else evaluation_problems(run)
    accuracy = values.pop(ACCURACY, math.nan)
    reward = values.pop("eval/reward_mean", None)
    unscored, unscored_samples = (
        values.pop(f"eval/{name}", 0) for name in ("unscored", "unscored_samples")
    )
    scored = None if problems is None else problems - int(unscored)
    passes = {}
    for name in [name for name in values if name.startswith("eval/pass@") and name[10:].isdigit()]:
        share = values.pop(name)
        passes[int(name[10:])] = (share, *(interval(share, problems) or (None, None)))
    others = {name.removeprefix("eval/"): value for name, value in values.items()}
    counts = {"unscored": unscored, "unscored_samples": unscored_samples}
    others |= {name: value for name, value in counts.items() if value}
    return EvaluationSummary(
        *(run.stages[stage], step, accuracy, interval(accuracy, scored), problems, reward),
        passes=dict(sorted(passes.items())),
        others=others,
    )


def interval(share: float, problems: int | None) -> tuple[float, float] | None:
    """Returns the 95% interval of a share, or None if it or the number of problems is unknown."""
    if problems is None or not math.isfinite(share):
        return None
    low, high = wilson(np.asarray([share]), problems)
    return float(low[0]), float(high[0])


@dataclass(frozen=True)
class Reached:
    """The first evaluation at an accuracy. seconds: of the run, None if they were not recorded."""

    accuracy: float
    stage: str
    step: int
    seconds: float | None


def reached(run: RecordedRun) -> list[Reached]:
    """Returns the first evaluation at each tenth of accuracy that the run reached."""
    result: list[Reached] = []
    for each in evaluations(run):
        while len(result) < 10 and each.accuracy >= (len(result) + 1) / 10 - 1e-12:
            seconds = run.seconds.get((each.stage, each.step))
            result.append(Reached((len(result) + 1) / 10, each.stage, each.step, seconds))
    return result


def total_seconds(run: RecordedRun) -> float | None:
    """Returns the seconds of all recorded steps and evaluations."""
    return max(run.seconds.values(), default=0.0) or None


def typical(run: RecordedRun, name: str) -> float | None:
    """Returns the median of a metric over the last half of the last stage that has it."""
    metric = run.metrics.get(name)
    if metric is None or not np.isfinite(metric.value).any():
        return None
    values = metric.value[(metric.stage == metric.stage[-1]) & np.isfinite(metric.value)]
    return float(np.median(values[len(values) // 2 :])) if len(values) else None


def ending(attempt: Attempt) -> str:
    """Returns the exit code of an attempt in words."""
    if attempt.code is None:
        return "-"
    if attempt.stopped is not None:
        return f"0: stopped after {attempt.stopped}"
    return f"{attempt.code}: {CODES.get(attempt.code, 'stopped by a signal')}"


def state(run: RecordedRun) -> tuple[str, str]:
    """Returns (kind, text) of how the run ended: kind is good, bad or open."""
    if run.attempts and run.attempts[-1].code is not None:
        code = run.attempts[-1].code
        if run.attempts[-1].stopped is not None:
            return "open", f"stopped after {run.attempts[-1].stopped}"
        if code == 0:
            return "good", "finished"
        return (
            "open" if code in (75, 130) else "bad"
        ), f"exit {code}: {CODES.get(code, 'stopped by a signal')}"
    if run.exported:
        return "good", "finished"
    return "open", "not finished"


def numbers(run: RecordedRun, axis: Axis, verdict: Sequence[str] = ()) -> dict[str, JsonValue]:
    """Returns the numbers of the report for a program: plain values, null for numbers that are not
    finite."""
    lines = [headline(run, name) for name in headlines([run])]
    value = {
        "run": str(run.path),
        "state": state(run)[1],
        "verdict": list(verdict),
        "stages": [
            {"stage": name, "first": run.steps[name][0], "last": run.steps[name][1]}
            for name in run.stages
        ],
        "attempts": [
            {"start": each.start, "end": each.end, "code": each.code} for each in run.attempts
        ],
        "seconds": total_seconds(run),
        "headline": {line.metric: _headline_numbers(line) for line in lines if line},
        **({"evaluation": run.evaluation} if run.evaluation else {}),
        "evaluations": [_evaluation_numbers(each) for each in evaluations(run)],
        "reached": [asdict(each) for each in reached(run)],
        "series": {
            name: _series(run, axis, metric) for name, metric in sorted(run.metrics.items())
        },
        "damaged": [str(each) for each in run.damage],
    }
    return {key: _finite(each) for key, each in value.items()}


def _headline_numbers(line: Headline) -> dict[str, JsonValue]:
    parts = {"first": line.first, "last": line.last, "best": line.best}
    return {key: asdict(part) if part else None for key, part in parts.items()}


def _evaluation_numbers(each: EvaluationSummary) -> dict[str, JsonValue]:
    low, high = each.interval or (None, None)
    return {
        "stage": each.stage,
        "step": each.step,
        "problems": each.problems,
        "accuracy": each.accuracy,
        "low": low,
        "high": high,
        "reward_mean": each.reward,
        "pass": {
            str(k): {"value": value, "low": lower, "high": upper}
            for k, (value, lower, upper) in each.passes.items()
        },
        **each.others,
    }


def _series(run: RecordedRun, axis: Axis, metric: Metric) -> dict[str, JsonValue]:
    shown = curve(*axis.positions(run, metric), metric.value)
    stages = [axis.stages[number] for number in shown.stage.tolist()]
    return {
        "stage": [stage.name for stage in stages],
        "step": [
            round(x - stage.start + stage.first, 1)
            for x, stage in zip(shown.x.tolist(), stages, strict=True)
        ],
        "mean": shown.mean.tolist(),
        "min": shown.low.tolist(),
        "max": shown.high.tolist(),
        "count": shown.count.tolist(),
    }


def _finite(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(runs: Sequence[RecordedRun]) -> str:
    """Returns tables of metrics (first, last, best), accuracies reached, and keys of the
    configuration that differ."""
    return "\n\n".join(part for part in (_metrics(runs), _reached(runs), _settings(runs)) if part)


def _metrics(runs: Sequence[RecordedRun]) -> str:
    rows = []
    for name in headlines(runs):
        for number, run in enumerate(runs):
            line = headline(run, name)
            if line is None:
                rows.append([name if not number else "", run.name, "-", "-", "-", "-"])
                continue
            best = text(line.best.value) if line.best else "-"
            where = f"{line.best.stage} {line.best.step:,}" if line.best else ""
            rows.append(
                [
                    name if not number else "",
                    run.name,
                    text(line.first.value),
                    text(line.last.value),
                    best,
                    where,
                ]
            )
    return _table(["metric", "run", "first", "last", "best", "best at step"], rows, (2, 3, 4))


def _reached(runs: Sequence[RecordedRun]) -> str:
    tables = [{each.accuracy: each for each in reached(run)} for run in runs]
    tenths = sorted({tenth for each in tables for tenth in each})
    rows = []
    for tenth in tenths:
        row = [f"{tenth:.1f}"]
        for each in tables:
            if tenth in each:
                first = each[tenth]
                row.append(f"{first.stage} {first.step:,}, {seconds_text(first.seconds)}")
            else:
                row.append("not reached")
        rows.append(row)
    return _table(["accuracy", *(run.name for run in runs)], rows, ()) if rows else ""


def _settings(runs: Sequence[RecordedRun]) -> str:
    rows = [[key, *map(_short, values)] for key, values in settings.differences(runs)]
    if not rows:
        return "configuration: no key differs"
    return _table(["key", *(run.name for run in runs)], rows, ())


def _short(value: JsonValue) -> str:
    shown = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    widths = [max(len(row[number]) for row in [head, *rows]) for number in range(len(head))]
    pad = lambda row: "  ".join(  # noqa: E731
        cell.rjust(width) if number in right else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "\n".join(pad(row).rstrip() for row in [head, ["-" * width for width in widths], *rows])
