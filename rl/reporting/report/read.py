"""Reads the folder of a run: metrics, attempts, configuration and programs. Files and keys may be missing.

A damaged line is kept as a `Damage` and reading goes on. A torn last line is no damage: the run may be writing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rewards.suggest import nearest
from rl.errors import ConfigError

EVENTS = "events.jsonl"
CONFIG = "config.yml"
INFO = "run.json"
PROGRAMS = "programs.json"
_SHOWN = 20  # damaged places that a message lists


@dataclass(frozen=True)
class Damage:
    """A place of a run folder that could not be read. `line` counts from 1; 0: the file as a unit."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Metric:
    """One metric over the steps that have it. stage: int[n], index in Run.stages; step: int[n]; value: float[n].

    A value that is null in the file is NaN.
    """

    stage: np.ndarray
    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Attempt:
    """One process of the run, from its start to its end. Times are Unix seconds. None: not recorded."""

    start: float | None = None
    end: float | None = None
    code: int | None = None


@dataclass
class Run:
    """What the folder of a run holds.

    steps maps a stage to its (first, last) recorded step. restarts lists the (stage, step) that a later attempt wrote
    first. seconds maps (stage, step) to the seconds of all steps and evaluations up to it; by the clock, pauses
    included, in a run without `time/step`. times maps it to its Unix seconds, if they are recorded.
    """

    path: Path
    name: str
    stages: list[str] = field(default_factory=list)
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    restarts: list[tuple[str, int]] = field(default_factory=list)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    times: dict[tuple[str, int], float] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    programs: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)

    @property
    def exported(self) -> bool:
        """Whether the run wrote its final weights, the last thing that it does."""
        return (self.path / "export").is_dir()


@dataclass(frozen=True)
class Part:
    """The part of a run that is shown: one stage or all, and steps first .. last of every stage."""

    stage: str | None = None
    first: int = 0
    last: float = math.inf

    def holds(self, stage: str, step: int) -> bool:
        """Tells whether a step belongs to the part."""
        return (self.stage is None or stage == self.stage) and self.first <= step <= self.last


def read_run(directory: str | Path, part: Part | None = None) -> Run:
    """Reads a run folder. Raises ConfigError if there is no run, or no stage of the requested name."""
    part = part or Part()
    path = Path(directory)
    if path.is_file():
        raise ConfigError(f"{path}: a file. Name the folder of the run: {path.parent}")
    if not path.is_dir():
        runs = [str(file.parent) for file in path.parent.glob(f"*/{EVENTS}")]
        raise ConfigError(f"{path}: no such folder{nearest(str(path), runs) or '. Name the folder of a run'}")
    if not (path / EVENTS).is_file() and not (path / CONFIG).is_file():
        near = sorted(str(file.parent) for file in path.glob(f"*/{EVENTS}"))[:3]
        hint = f". Runs below it: {', '.join(near)}" if near else ""
        raise ConfigError(f"{path}: not a run: it has no {EVENTS}{hint}")
    run = Run(path, path.resolve().name)
    _read_events(run, part)
    run.config = _read_config(run)
    run.info = _read_json(run, INFO)
    programs = _read_json(run, PROGRAMS).get("programs")
    run.programs = [each for each in programs if isinstance(each, dict)] if isinstance(programs, list) else []
    run.attempts = _attempts(run.info) or run.attempts
    run.info = _facts(run.info)
    run.restarts = run.restarts or _restarts(run)
    return run


def check_steps(run: Run, part: Part) -> None:
    """Raises ConfigError if the part of the run holds no step although the run has some."""
    if run.stages or (part.stage is None and part == Part()):
        return
    names = sorted({row["stage"] for _, row in json_lines(run.path / EVENTS, []) if isinstance(row.get("stage"), str)})
    if part.stage is not None and part.stage not in names:
        raise ConfigError(f"--stage {part.stage}: {run.path} has no such stage (valid: {', '.join(names) or 'none'})")
    raise ConfigError(f"--steps: {run.path} recorded no step there")


def json_lines(path: Path, damage: list[Damage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of the complete lines of a file. Appends the others to `damage`."""
    if not path.is_file():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        damage.append(Damage(path, 0, f"cannot be read: {error.strerror}"))
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # torn: a process is writing it, or was killed while it did
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield number, row
            elif line.strip() or row is not None:
                damage.append(Damage(path, number, "damaged line; delete it, or restore it from a backup"))


def _read_events(run: Run, part: Part) -> None:
    """Fills the metrics, stages, times and attempts of a run from its events."""
    file = run.path / EVENTS
    steps: dict[tuple[str, int], dict[str, Any]] = {}
    times: dict[tuple[str, int], float] = {}
    ended = False
    for number, row in json_lines(file, run.damage):
        kind = row.get("event")
        if kind == "end":
            run.attempts.append(Attempt(end=_number(row.get("time")), code=_code(row.get("code"))))
            ended = True
            continue
        stage, step, metrics = row.get("stage"), row.get("step"), row.get("metrics")
        if not (isinstance(stage, str) and isinstance(step, int) and isinstance(metrics, dict)):
            if not isinstance(kind, str):
                run.damage.append(Damage(file, number, "no `stage`, `step` and `metrics`"))
            continue
        place = (stage, int(step))
        if not part.holds(*place):
            continue
        if ended:
            run.restarts.append(place)
            ended = False
        steps[place] = steps[place] | metrics if place in steps else metrics
        if (time := _number(row.get("time"))) is not None:
            times[place] = time
    run.times = {place: times[place] for place in steps if place in times}
    _fill(run, steps, times)


def _fill(run: Run, steps: Mapping[tuple[str, int], dict], times: Mapping[tuple[str, int], float]) -> None:
    """Fills stages, steps, seconds and metrics of a run from the metrics of each (stage, step)."""
    run.stages = list(dict.fromkeys(stage for stage, _ in steps))
    index = {name: number for number, name in enumerate(run.stages)}
    places = sorted(steps, key=lambda each: (index[each[0]], each[1]))
    # Most steps have the metrics of the step before, so rows of equal keys are turned into columns together.
    groups: dict[tuple[str, ...], list[int]] = {}
    spent = 0.0
    for row, place in enumerate(places):
        metrics = steps[place]
        groups.setdefault(tuple(metrics), []).append(row)
        first, _ = run.steps.get(place[0], (place[1], place[1]))
        run.steps[place[0]] = (first, place[1])
        spent += sum(_number(metrics.get(name)) or 0.0 for name in ("time/step", "time/eval"))
        run.seconds[place] = spent
    if not spent and times and len(times) == len(steps):
        start = min(times.values())
        run.seconds = {place: time - start for place, time in times.items()}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for names, rows in groups.items():
        for name, column in zip(names, zip(*(steps[places[row]].values() for row in rows), strict=True), strict=True):
            value, known = _column(column)
            if known.any():
                parts.setdefault(name, []).append((np.asarray(rows)[known], value[known]))
    stage = np.asarray([index[name] for name, _ in places], np.int64)
    step = np.asarray([number for _, number in places], np.int64)
    for name, each in parts.items():
        row, value = (np.concatenate(pieces) for pieces in zip(*each, strict=True))
        order = np.argsort(row, kind="stable")
        run.metrics[name] = Metric(stage[row[order]], step[row[order]], value[order])


def _column(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of a metric, float[n] with NaN for null, and which of its values are numbers or null, bool[n]."""
    if all(type(value) is float for value in values):
        return np.asarray(values, np.float64), np.ones(len(values), bool)
    numbers = [math.nan if value is None else _number(value) for value in values]
    known = np.asarray([value is not None for value in numbers])
    return np.asarray([math.nan if value is None else value for value in numbers]), known


def _read_config(run: Run) -> dict[str, Any]:
    from rl.config import yaml_tree

    file = run.path / CONFIG
    if not file.is_file():
        return {}
    try:
        tree = yaml_tree.plain(yaml_tree.parse(file.read_text(), lambda line: f"{file}:{line}"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        run.damage.append(Damage(file, 0, f"cannot be read: {str(error).splitlines()[0]}"))
        return {}
    return tree if isinstance(tree, dict) else {}


def _read_json(run: Run, name: str) -> dict[str, Any]:
    file = run.path / name
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        run.damage.append(Damage(file, 0, f"cannot be read: {error}"))
        return {}
    return value if isinstance(value, dict) else {}


def _attempts(info: Mapping[str, Any]) -> list[Attempt]:
    """Reads the attempts of run.json."""
    rows = info.get("attempts")
    if not isinstance(rows, list):
        return []
    first = lambda row, *keys: next((row[key] for key in keys if row.get(key) is not None), None)  # noqa: E731
    return [
        Attempt(_number(first(row, "start", "started")), _number(first(row, "end", "ended")), _code(_exit(row)))
        for row in rows
        if isinstance(row, dict)
    ]


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what run.json says about the newest attempt, apart from its times and its end."""
    rows, times = info.get("attempts"), ("start", "end", "exit_code", "code")
    newest = rows[-1] if isinstance(rows, list) and rows and isinstance(rows[-1], dict) else {}
    return {key: value for key, value in {**info, **newest}.items() if key not in ("attempts", *times)}


def _restarts(run: Run) -> list[tuple[str, int]]:
    """Returns the first (stage, step) of each attempt after the first, by their times."""
    starts = [each.start for each in run.attempts[1:] if each.start is not None]
    places = [next((place for place, time in run.times.items() if time >= start), None) for start in starts]
    return [place for place in dict.fromkeys(places) if place is not None and place != next(iter(run.times))]


def _exit(row: Mapping[str, Any]) -> Any:
    return row["code"] if "code" in row else row.get("exit_code")


def _code(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """Converts a number of a file; None for anything else."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan


def evaluation_problems(run: Run) -> int | None:
    """Returns how many problems an evaluation of the run has by its configuration, or None."""
    count = (run.config.get("evaluation") or {}).get("problems")
    return count if isinstance(count, int) and count > 0 else None


def damage_text(damage: list[Damage]) -> str:
    """Returns one line for each damaged place, at most 20, for a message."""
    more = [f"... and {len(damage) - _SHOWN} more"] if len(damage) > _SHOWN else []
    return "\n".join([*map(str, damage[:_SHOWN]), *more])
