"""Writes the comparison of runs as text: headline numbers, time to each tenth of accuracy, configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl.reporting.report import settings, summary
from rl.reporting.report.read import Run
from rl.reporting.report.series import seconds_text, text


def compare(runs: Sequence[Run]) -> str:
    """Returns three tables: metrics (first, last, best), accuracies reached, and different keys of the configuration."""
    return "\n\n".join(part for part in (_metrics(runs), _reached(runs), _settings(runs)) if part)


def _metrics(runs: Sequence[Run]) -> str:
    rows = []
    for name in summary.headlines(runs):
        for number, run in enumerate(runs):
            line = summary.headline(run, name)
            if line is None:
                rows.append([name if not number else "", run.name, "-", "-", "-", "-"])
                continue
            best = text(line.best[0]) if line.best else "-"
            where = f"{line.best[1]} {line.best[2]:,}" if line.best else ""
            rows.append([name if not number else "", run.name, text(line.first[0]), text(line.last[0]), best, where])
    return _table(["metric", "run", "first", "last", "best", "best at step"], rows, (2, 3, 4))


def _reached(runs: Sequence[Run]) -> str:
    tables = [{tenth: rest for tenth, *rest in summary.reached(run)} for run in runs]
    tenths = sorted({tenth for each in tables for tenth in each})
    rows = []
    for tenth in tenths:
        row = [f"{tenth:.1f}"]
        for each in tables:
            stage, step, seconds = each.get(tenth, (None, None, None))
            row.append(f"{stage} {step:,}, {seconds_text(seconds)}" if stage is not None else "not reached")
        rows.append(row)
    return _table(["accuracy", *(run.name for run in runs)], rows, ()) if rows else ""


def _settings(runs: Sequence[Run]) -> str:
    rows = [[key, *map(_short, values)] for key, values in settings.differences(runs)]
    if not rows:
        return "configuration: no key differs"
    return _table(["key", *(run.name for run in runs)], rows, ())


def _short(value: Any) -> str:
    shown = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    widths = [max(len(row[number]) for row in [head, *rows]) for number in range(len(head))]
    pad = lambda row: "  ".join(  # noqa: E731
        cell.rjust(width) if number in right else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "\n".join(pad(row).rstrip() for row in [head, ["-" * width for width in widths], *rows])
