"""What `rl report` and `rl compare` do: read runs, write the page, say which lines are damaged."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policy.json_types import JsonValue
from rl.errors import ConfigError, DataError, DuetError, ResourceError
from rl.evaluation import paired
from rl.records.run_files import Damage
from rl.views.report import page, samples, series, summary
from rl.views.report.read import RecordedRun, ReportPart, check_steps, damage_text, read_run


@dataclass(frozen=True)
class ReportFlags:
    """The flags of the two verbs. output, json: paths, or "-" for standard output."""

    output: str | None = None
    samples: int = 200
    part: ReportPart = ReportPart()
    against: str | None = None
    json: str | None = None
    open: bool = False


def part_of(stage: str | None, steps: str | None) -> ReportPart:
    """Reads --stage and --steps A:B. Raises ConfigError for steps of another form."""
    if steps is None:
        return ReportPart(stage)
    match = re.fullmatch(r"(\d*):(\d*)", steps)
    first, last = (int(match[1] or 0), float(match[2] or "inf")) if match else (1, 0.0)
    if first > last:
        raise ConfigError(
            f"--steps {steps}: not a range of steps; write first:last, e.g. 100:200, or 100:"
        )
    return ReportPart(stage, first, last)


def report(directories: Sequence[str], options: ReportFlags) -> int:
    """Writes the report of a run, or of several together. Returns the exit code.

    Raises ConfigError if a folder holds no run, DataError after writing a report that leaves
    damaged lines out.
    """
    runs = _read(directories, options.part)
    against = _read([options.against], options.part)[0] if options.against is not None else None
    axis = series.axis([*runs, *([against] if against else [])])
    share = options.samples // len(runs)
    chosen = [samples.choose(run.path, share, options.part, run.damage) for run in runs]
    if against is not None:
        runs[0].damage += against.damage
    verdicts = [verdict(run) for run in runs]
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    shown = page.page(page.ReportPage(runs, axis, chosen, verdicts, against, created))
    output = options.output or str(
        runs[0].path / ("report.html" if len(runs) == 1 else "compare.html")
    )
    _write(output, shown)
    if options.json:
        values = [
            summary.numbers(run, axis, lines) for run, lines in zip(runs, verdicts, strict=True)
        ]
        together = {"runs": values} | ({"paired": _paired(runs)} if _all_evaluations(runs) else {})
        _write(
            options.json,
            json.dumps(values[0] if len(values) == 1 else together, indent=1) + "\n",
        )
    if output != "-" and _all_evaluations(runs):
        print(_evaluations_text(runs))
    if output != "-":
        print(f"{output} ({len(shown.encode('utf-8', 'replace')) / 1e6:.2f} MB)", file=sys.stderr)
    if options.open and output != "-":
        import webbrowser

        webbrowser.open(Path(output).resolve().as_uri())
    _refuse([each for run in runs for each in run.damage], output)
    return 0


def compare_text(directories: Sequence[str], part: ReportPart) -> int:
    """Prints the comparison of runs as tables. Raises as `report` does."""
    runs = _read(directories, part)
    print(_evaluations_text(runs) if _all_evaluations(runs) else summary.compare(runs))
    _refuse([each for run in runs for each in run.damage], None)
    return 0


def _all_evaluations(runs: Sequence[RecordedRun]) -> bool:
    """Tells whether several folders are all of `rl eval`."""
    return len(runs) > 1 and all(run.evaluation for run in runs)


def _evaluations_text(runs: Sequence[RecordedRun]) -> str:
    """Returns the paired differences of evaluations, and the settings that differ. Raises
    DataError."""
    names = [run.name for run in runs]
    return paired.text(names, [run.path for run in runs], [run.evaluation for run in runs])


def _paired(runs: Sequence[RecordedRun]) -> list[JsonValue]:
    """Returns the differences of each further evaluation from the first, for a program."""
    return [
        {"run": str(run.path), **dataclasses.asdict(each)}
        for run in runs[1:]
        for each in paired.differences(runs[0].path, run.path)
    ]


def verdict(run: RecordedRun) -> list[str]:
    """Returns what `rl explain` says about the run, at most eight lines; nothing about an
    evaluation."""
    if run.evaluation:
        return []
    try:
        from rl.views.explain import verdict as explain
    except ImportError:
        return []
    try:
        return explain(run.path)[:8]
    except DuetError:  # no events yet, or damaged ones, which the report names
        return []


def _read(directories: Sequence[str], part: ReportPart) -> list[RecordedRun]:
    runs = [read_run(directory, part) for directory in directories]
    for run in runs:
        check_steps(run, part)
    for depth in range(2, 9):
        names = [run.name for run in runs]
        for run in runs:
            if names.count(run.name) > 1:
                run.name = "/".join(run.path.resolve().parts[-depth:])
    return runs


def _write(output: str, content: str) -> None:
    """Writes a file in one step, so that a reader sees the old one or the new one."""
    if output == "-":
        print(content, end="")
        return
    path = Path(output)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(content, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(
            f"{path}: cannot be written: {error.strerror}. Choose another file with -o"
        ) from None


def _refuse(damage: Sequence[Damage], output: str | None) -> None:
    if damage:
        written = f"{output} is written without them.\n" if output not in (None, "-") else ""
        raise DataError(
            f"{len(damage)} places could not be read. {written}{damage_text(list(damage))}"
        )
