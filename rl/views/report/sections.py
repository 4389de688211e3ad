"""Writes the sections of the page that are text and tables. Every text of a run is escaped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

from policy.json_types import JsonObject, JsonValue, as_object, as_objects
from rl.config.stage_names import stage_names
from rl.views.evaluated import facts
from rl.views.report import settings, summary
from rl.views.report.plans import ACCURACY
from rl.views.report.read import RecordedRun
from rl.views.report.series import esc, seconds_text, text
from rl.views.report.svg import TONES

_Row = TypeVar("_Row")
_EVALUATIONS = 300  # rows of their table
_LONGEST = 40_000  # characters of a configuration
_ROWS = 12  # rows of a table of programs before the rest is folded


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Sequence[int] = (),
    kind: str = "scroll",
) -> str:
    """Returns a table. Cells are HTML; `numeric` lists the columns that are aligned to the
    right."""
    mark = lambda number: ' class="n"' if number in numeric else ""  # noqa: E731
    top = "".join(f"<th{mark(n)}>{esc(name)}</th>" for n, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{mark(n)}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="{kind}"><table>{top}<tbody>{body}</tbody></table></div>'


def pill(run: RecordedRun) -> str:
    """Returns the state of a run as a coloured label."""
    kind, words = summary.state(run)
    return f'<span class="pill {kind}">{esc(words)}</span>'


def about(run: RecordedRun) -> str:
    """Returns one line: model, algorithms, device, start."""
    parts = []
    model = run.config.get("model")
    source = model.get("source") if isinstance(model, dict) else model
    if source:
        weights = run.info.get("weights")
        random = (
            " (random weights)" if isinstance(weights, str) and weights.startswith("random") else ""
        )
        parts.append(f"{source}{random}")
    if run.stages:
        parts.append(" → ".join(run.stages))
    if run.evaluation:
        parts.append(f"evaluation of {facts.model_name(run)}")
    if device := device_text(run):
        parts.append(device)
    if "seed" in run.config:
        parts.append(f"seed {run.config['seed']}")
    if run.attempts and run.attempts[0].start:
        parts.append(moment(run.attempts[0].start))
    return " · ".join(map(esc, parts))


def device_text(run: RecordedRun) -> str:
    """Returns the devices of the run, e.g. `8 x TPU v5p`; the platform of the configuration if they
    are unknown."""
    devices = run.info.get("devices")
    if isinstance(devices, dict) and "kind" in devices:
        return f"{devices.get('count', 1)} x {devices['kind']}"
    platform = run.config.get("platform")
    return platform if isinstance(platform, str) and platform != "auto" else ""


def moment(seconds: float | None) -> str:
    """Returns a time of the clock in UTC."""
    if seconds is None or not 0 <= seconds < 1e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def tiles(run: RecordedRun, samples: int) -> str:
    """Returns the headline numbers of a run as tiles, each only if the run has it."""
    made = []
    accuracy = summary.headline(run, ACCURACY)
    reward = summary.headline(run, "reward/mean")
    made += facts.tiles(run)
    if accuracy:
        last = summary.evaluations(run)
        bounds = next((each.interval for each in reversed(last) if each.interval), None)
        shown = f", 95%: {text(bounds[0])} to {text(bounds[1])}" if bounds else ""
        made.append(
            ("Accuracy", text(accuracy.last.value), f"from {text(accuracy.first.value)}{shown}")
        )
    if reward:
        made.append(
            (
                "Reward",
                text(reward.last.value),
                f"from {text(reward.first.value)}, best {text(_best(reward))}",
            )
        )
    for name, title in (
        ("rewards/accuracies", "Pairs ranked right"),
        ("reward_model/accuracy", "Pairs ranked right"),
    ):
        if (pairs := summary.headline(run, name)) and len(made) < 3:
            made.append((title, text(pairs.last.value), f"from {text(pairs.first.value)}"))
    if not made and (loss := summary.headline(run, "loss")):
        made.append(("Loss", text(loss.last.value), f"from {text(loss.first.value)}"))
    steps = {name: last for name, (_, last) in run.steps.items()}
    if steps:
        each = (
            ", ".join(f"{name} {count:,}" for name, count in steps.items())
            if len(steps) > 1
            else next(iter(steps))
        )
        made.append(("Steps", f"{sum(steps.values()):,}", each))
    if spent := summary.total_seconds(run):
        usual = summary.typical(run, "time/step")
        made.append(
            (
                "Time in steps",
                seconds_text(spent),
                f"{seconds_text(usual)} a step at the end" if usual else "",
            )
        )
    if speed := summary.typical(run, "perf/step_tokens_per_s"):
        made.append(("Tokens per second", text(speed), "per device, full step"))
    if samples:
        made.append(("Completions", f"{samples:,}", "recorded"))
    cells = (
        f'<div class="card tile"><div class="name">{esc(a)}</div><div class="value">{esc(b)}</div>'
        f'<div class="sub">{esc(c)}</div></div>'
        for a, b, c in made
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if made else ""


def _best(line: summary.Headline) -> float:
    return line.best.value if line.best else line.last.value


def overview(runs: Sequence[RecordedRun]) -> str:
    """Returns the headline numbers of several runs as a table, with the colour of each run."""
    rows = []
    for number, run in enumerate(runs):
        accuracy = summary.headline(run, ACCURACY)
        reward = summary.headline(run, "reward/mean")
        rows.append(
            [
                f'<span class="dot t{number % TONES}"></span>{esc(run.name)}',
                esc(" → ".join(run.stages)),
                f"{sum(last for _, last in run.steps.values()):,}",
                seconds_text(summary.total_seconds(run)),
                text(accuracy.last.value) if accuracy else "-",
                text(_best(accuracy)) if accuracy else "-",
                text(reward.last.value) if reward else "-",
                text(summary.typical(run, "perf/step_tokens_per_s")),
                pill(run),
            ]
        )
    head = (
        "run",
        "stages",
        "steps",
        "time in steps",
        "accuracy",
        "best",
        "reward",
        "tokens/s",
        "state",
    )
    return f'<div class="card">{table(head, rows, (2, 3, 4, 5, 6, 7))}</div>'


def stages(runs: Sequence[RecordedRun]) -> str:
    """Returns the tables of stages and attempts."""
    named = ["run"] if len(runs) > 1 else []
    shift = len(named)
    result = ""
    rows = [[*([esc(run.name)] * shift), *row] for run in runs for row in _stage_rows(run)]
    if rows:
        head = (*named, "stage", "steps", "time in steps", "metric", "first", "last")
        result = table(head, rows, [shift + n for n in (1, 2, 4, 5)])
    rows = [[*([esc(run.name)] * shift), *row] for run in runs for row in _attempt_rows(run)]
    if rows:
        head = (*named, "attempt", "start", "end", "duration", "exit code")
        result += "<h3>Attempts</h3>" + table(head, rows, [shift + 3])
    rows = [[*([esc(run.name)] * shift), *row] for run in runs for row in _change_rows(run)]
    if rows:
        head = (*named, "stage", "from step", "key", "before", "after")
        result += "<h3>Changes</h3>" + table(head, rows, [shift + 1])
    return f'<div class="card">{result}</div>' if result else ""


def _change_rows(run: RecordedRun) -> list[list[str]]:
    """Returns a row for each value that the run changed when it was continued."""
    return [
        [
            esc(each.stage),
            f"{each.step:,}",
            f'<span class="mono">{esc(each.key)}</span>',
            *map(_setting, each.values),
        ]
        for each in settings.run_changes(run)
    ]


def _stage_rows(run: RecordedRun) -> list[list[str]]:
    entries = run.config.get("stages")
    rows = []
    planned = entries if isinstance(entries, list) else []
    for number, name in enumerate(_stage_names(run)):
        entry = as_object(planned[number]) if number < len(planned) else {}
        _, last = run.steps.get(name, (0, 0))
        spent = [run.seconds[place] for place in run.seconds if place[0] == name]
        before = max(
            (run.seconds[place] for place in run.seconds if _earlier(run, place[0], name)),
            default=0.0,
        )
        done = f"{last:,}" if name in run.steps else "not started"
        if isinstance(steps := entry.get("steps"), int) and name in run.steps and steps != last:
            done += f" of {steps:,}"
        for each in reversed(run.attempts):  # a stage that got more steps has a newer one
            if (taken := each.best(name)) is not None:
                done += f"; best: {taken}"
                break
        rows.append(
            [
                esc(name),
                done,
                seconds_text(max(spent) - before) if spent else "-",
                *_metric_cells(run, name),
            ]
        )
    return rows


def _attempt_rows(run: RecordedRun) -> list[list[str]]:
    rows = []
    for number, each in enumerate(run.attempts, 1):
        length = each.end - each.start if each.start and each.end else None
        rows.append(
            [
                str(number),
                moment(each.start),
                moment(each.end),
                seconds_text(length),
                esc(summary.ending(each)),
            ]
        )
    return rows[-50:]


def _stage_names(run: RecordedRun) -> list[str]:
    """Returns the stages of the run, those that have not begun included."""
    names = stage_names(run.config)
    return names if set(run.stages) <= set(names) else run.stages


def _earlier(run: RecordedRun, stage: str, than: str) -> bool:
    return than in run.stages and run.stages.index(stage) < run.stages.index(than)


def _metric_cells(run: RecordedRun, stage: str) -> list[str]:
    """Returns three cells: the metric that says most about a stage, its first and last value."""
    for name in (
        ACCURACY,
        "reward/mean",
        "rewards/accuracies",
        "reward_model/accuracy",
        "kto/correct_side",
        "loss",
    ):
        if (metric := run.metrics.get(name)) is not None and stage in run.stages:
            values = metric.value[metric.stage == run.stages.index(stage)]
            values = [each for each in values.tolist() if math.isfinite(each)]
            if values:
                shown = f'<span class="mono">{esc(name)}</span>'
                return [shown, text(values[0]), text(values[-1])]
    return ["-", "-", "-"]


def evaluation_table(runs: Sequence[RecordedRun]) -> str:
    """Returns the table of all evaluations, or "" without any."""
    rows = []
    every = [(run, each) for run in runs for each in summary.evaluations(run)]
    passes = sorted({k for _, each in every for k in each.passes})
    others = sorted({name for _, each in every for name in each.others})[:8]
    for run, each in _spread(every):
        between = f"{text(each.interval[0])} to {text(each.interval[1])}" if each.interval else "-"
        cells = [esc(each.stage), f"{each.step:,}", text(each.accuracy), between, _bar(each)]
        for k in passes:
            value, low, high = each.passes.get(k, (math.nan, None, None))
            cells.append(
                text(value) + (f" ({text(low)} to {text(high)})" if low is not None else "")
            )
        cells += [text(each.reward), *(text(each.others.get(name)) for name in others)]
        cells.append("-" if each.problems is None else f"{each.problems:,}")
        rows.append([esc(run.name), *cells] if len(runs) > 1 else cells)
    if not rows:
        return ""
    head = [
        "stage",
        "step",
        "accuracy",
        "95% interval",
        "",
        *(f"pass@{k}" for k in passes),
        "mean reward",
        *others,
    ]
    head = [*(["run"] if len(runs) > 1 else []), *head, "problems"]
    shift = len(runs) > 1
    right = [n + shift for n in (1, 2)] + list(range(5 + shift, len(head)))
    scroll = "scroll tall" if len(rows) > 14 else "scroll"
    return f'<div class="card">{table(head, rows, right, scroll)}</div>'


def _spread(every: Sequence[_Row]) -> Sequence[_Row]:
    """Returns at most _EVALUATIONS of the rows, evenly spread, the first and the last included."""
    if len(every) <= _EVALUATIONS:
        return every
    return [every[round(n * (len(every) - 1) / (_EVALUATIONS - 1))] for n in range(_EVALUATIONS)]


def _bar(each: summary.EvaluationSummary) -> str:
    if not math.isfinite(each.accuracy):
        return ""
    low, high = each.interval or (each.accuracy, each.accuracy)
    value = max(0.0, min(1.0, each.accuracy))
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" '
        'aria-hidden="true"><rect width="100" '
        f'height="10"/><rect class="v" width="{value * 100:.1f}" height="10"/>'
        f'<rect class="i" x="{low * 100:.1f}" width="{(high - low) * 100:.1f}" height="10"/></svg>'
    )


def curricula(run: RecordedRun) -> str:
    """Returns the histograms of the curricula of a run, or ""."""
    result = ""
    for stage, shown in run.curricula.items():
        rows = as_objects(as_object(shown).get("bars"))
        counts = [(_count(each.get("drawn")), _count(each.get("left_out"))) for each in rows]
        most = max((sum(pair) for pair in counts), default=0)
        if not most:
            continue
        lines = [
            [esc(each.get("label")), _count_bar(*pair, most), *(f"{count:,}" for count in pair)]
            for each, pair in zip(rows, counts, strict=True)
        ]
        head = ("", "", "rows drawn from", "rows left out")
        title = f"{esc(stage)}: {esc(as_object(shown).get('title'))}"
        result += f'<h3>{title}</h3><div class="card">{table(head, lines, (2, 3))}</div>'
    return result


def _count(value: JsonValue) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _count_bar(drawn: int, left_out: int, most: int) -> str:
    """Returns a bar of two parts: rows that are drawn from, and thinner, rows that are left out."""
    first, second = (100 * count / most for count in (drawn, left_out))
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="100" height="10"/><rect class="v" width="{first:.1f}" height="10"/>'
        f'<rect class="i" x="{first:.1f}" width="{second:.1f}" height="10"/></svg>'
    )


def configuration(runs: Sequence[RecordedRun]) -> str:
    """Returns what the configuration changes, its full text, and what differs between runs."""
    parts = []
    if len(runs) > 1:
        rows = [
            [f'<span class="mono">{esc(key)}</span>', *map(_setting, values)]
            for key, values in settings.differences(runs)
        ]
        head = ("key", *(run.name for run in runs))
        shown = (
            table(head, rows, kind="scroll tall" if len(rows) > 16 else "scroll")
            if rows
            else "<p>No key differs.</p>"
        )
        parts.append(f'<h3>Difference of the runs</h3><div class="card">{shown}</div>')
    for run in runs:
        if not run.config:
            continue
        texts = settings.yaml_text(settings.changed(run.config)), settings.yaml_text(run.config)
        short, full = (
            each if len(each) <= _LONGEST else f"{each[:_LONGEST]}\n... (see config.yml)"
            for each in texts
        )
        title = "Changed from the defaults" + (f": {esc(run.name)}" if len(runs) > 1 else "")
        body = f'<pre class="block">{esc(short)}</pre>'
        fold = (
            '<details class="fold"><summary>All keys</summary><pre '
            f'class="block">{esc(full)}</pre></details>'
        )
        parts.append(f'<h3>{title}</h3><div class="card">{body}{fold}</div>')
    return "".join(parts)


def _setting(value: JsonValue) -> str:
    return (
        '<span class="mono">'
        + (esc(json.dumps(value, ensure_ascii=False)) if value is not None else "-")
        + "</span>"
    )


def programs(run: RecordedRun) -> str:
    """Returns the table of compiled programs by peak memory, or ""."""

    def size(program: JsonObject, key: str) -> float:
        return number if isinstance(number := program.get(key), (int, float)) else 0

    rows = [
        [
            esc(each.get("name", "?")),
            esc(
                " x ".join(map(str, shape if isinstance(shape := each.get("shape"), list) else ()))
            ),
            *(
                f"{size(each, key) / 2**20:,.2f}"
                for key in ("arguments", "temporaries", "outputs", "peak")
            ),
        ]
        for each in sorted(run.programs, key=lambda each: -size(each, "peak"))[:200]
    ]
    if not rows:
        return ""
    head = ("program", "shape", "arguments", "temporaries", "outputs", "peak")
    shown = table(head, rows[:_ROWS], (2, 3, 4, 5))
    rest = ""
    if len(rows) > _ROWS:
        more = table(head, rows[_ROWS:], (2, 3, 4, 5))
        rest = (
            f'<details class="fold"><summary>{len(rows) - _ROWS} more '
            f"programs</summary>{more}</details>"
        )
    return f'<p class="about lead">MiB per device.</p><div class="card">{shown}{rest}</div>'


def versions(run: RecordedRun) -> str:
    """Returns what run.json says about versions, command, devices and git, or "" without it."""
    rows = [
        [f'<span class="mono">{esc(key)}</span>', f'<span class="mono">{esc(_short(value))}</span>']
        for key, value in settings.flat(run.info)
        if value not in (None, "", [], {})
    ]
    return f'<div class="card">{table(("", ""), rows[:80])}</div>' if rows else ""


def _short(value: JsonValue) -> str:
    shown = (
        value
        if isinstance(value, str)
        else " ".join(map(str, value))
        if isinstance(value, list)
        else json.dumps(value)
    )
    return shown if len(shown) <= 2000 else shown[:2000] + " ..."
