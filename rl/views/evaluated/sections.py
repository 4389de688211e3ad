"""The tables of evaluations for the page of a report. Every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence

from rl.errors import DataError
from rl.evaluation import files, paired, tables
from rl.evaluation.tables import Table
from rl.views.report.read import RecordedRun
from rl.views.report.sections import table
from rl.views.report.series import esc


def section(runs: Sequence[RecordedRun]) -> str:
    """Returns the scores of each evaluation, what the further ones differ from the first by, and
    the settings that differ; "" without an evaluation."""
    shown = [run for run in runs if run.evaluation]
    parts = []
    for run in shown:
        results = files.results(run.evaluation)
        notes = "".join(f"<p>{esc(line)}</p>" for line in tables.cut(results))
        title = f"<h3>{esc(run.name)}</h3>" if len(runs) > 1 else ""
        every = [tables.scores(results), *tables.by_column(results)]
        parts.append(title + "".join(map(_html, every)) + notes)
    if len(shown) > 1:
        parts.append(_compared(shown))
    return f'<div class="card">{"".join(parts)}</div>' if parts else ""


def _compared(runs: Sequence[RecordedRun]) -> str:
    """Returns the paired differences, and the settings that differ."""
    names = [run.name for run in runs]
    result = "<h3>Paired differences, on the problems that both have</h3>"
    try:
        result += _html(paired.compared(names, [run.path for run in runs]))
    except DataError as error:
        result += f"<p>{esc(error)}</p>"
    settings = paired.settings(names, [run.evaluation for run in runs])
    return result + (f"<h3>Settings that differ</h3>{_html(settings)}" if settings.rows else "")


def _html(shown: Table) -> str:
    rows = [[esc(cell) for cell in row] for row in shown.rows]
    numeric = [n for n, name in enumerate(shown.head) if name in ("accuracy", "n", "difference")]
    return table(shown.head, rows, numeric)
