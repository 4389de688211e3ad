"""Reads the folder of a run: metrics, attempts, configuration and programs. Files and keys may be
missing.

rl/records/run_files.py reads the files; here the metrics become arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from policy.json_types import JsonObject, JsonValue, as_object, as_objects
from rl.errors import ConfigError
from rl.evaluation import files
from rl.records.run_files import (
    CURRICULUM,
    Attempt,
    Damage,
    RecordedStep,
    as_number,
    attempts,
    check_run,
    read_config,
    read_json,
    steps,
)

PROGRAMS = "programs.json"
_SHOWN = 20  # damaged places that a message lists


@dataclass(frozen=True)
class Metric:
    """One metric over the steps that have it. stage: int[n], index in Run.stages; step: int[n];
    value: float[n].

    A value that is null in the file is NaN.
    """

    stage: np.ndarray
    step: np.ndarray
    value: np.ndarray


@dataclass
class RecordedRun:
    """What the folder of a run holds.

    steps maps a stage to its (first, last) recorded step. restarts lists the (stage, step) that a
    later attempt wrote first. seconds maps (stage, step) to the seconds of all steps and
    evaluations up to it; by the clock, pauses included, in a run without `time/step`. times maps it
    to its Unix seconds, if they are recorded. curricula: the histogram of each stage with a
    curriculum, as curriculum.json has it. evaluation: eval.json of the folder of `rl eval`, whose
    tasks are no stages here.
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
    config: dict[str, JsonValue] = field(default_factory=dict)
    programs: list[JsonObject] = field(default_factory=list)
    curricula: dict[str, JsonValue] = field(default_factory=dict)
    info: dict[str, JsonValue] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)

    @property
    def exported(self) -> bool:
        """Whether the run wrote its final weights, the last thing that it does."""
        return (self.path / "export").is_dir()


@dataclass(frozen=True)
class ReportPart:
    """The part of a run that is shown: one stage or all, and steps first .. last of every stage."""

    stage: str | None = None
    first: int = 0
    last: float = math.inf

    def holds(self, stage: str, step: int) -> bool:
        """Tells whether a step belongs to the part."""
        return (self.stage is None or stage == self.stage) and self.first <= step <= self.last


def read_run(directory: str | Path, part: ReportPart | None = None) -> RecordedRun:
    """Reads a run folder. Raises ConfigError if there is no run, or no stage of the requested
    name."""
    part = part or ReportPart()
    path = Path(directory)
    check_run(path)
    run = RecordedRun(path, path.resolve().name)
    shown = {place: step for place, step in steps(path, run.damage).items() if part.holds(*place)}
    run.evaluation = files.content(path, run.damage)
    if run.evaluation:
        shown = {}
    run.times = {place: step.time for place, step in shown.items() if step.time is not None}
    _fill(run, shown)
    run.config = read_config(path, run.damage)
    run.attempts = attempts(path, run.damage)
    run.info = dict(run.attempts[-1].facts) if run.attempts else {}
    run.curricula = read_json(path / CURRICULUM, run.damage)
    run.programs = as_objects(read_json(path / PROGRAMS, run.damage).get("programs"))
    run.restarts = _restarts(run)
    return run


def check_steps(run: RecordedRun, part: ReportPart) -> None:
    """Raises ConfigError if the part of the run holds no step although the run has some."""
    if run.stages or (part.stage is None and part == ReportPart()):
        return
    names = sorted({stage for stage, _ in steps(run.path, [])})
    if part.stage is not None and part.stage not in names:
        raise ConfigError(
            f"--stage {part.stage}: {run.path} has no such stage (valid: "
            f"{', '.join(names) or 'none'})"
        )
    raise ConfigError(f"--steps: {run.path} recorded no step there")


def _fill(run: RecordedRun, shown: Mapping[tuple[str, int], RecordedStep]) -> None:
    """Fills stages, steps, seconds and metrics of a run from its steps."""
    run.stages = list(dict.fromkeys(stage for stage, _ in shown))
    index = {name: number for number, name in enumerate(run.stages)}
    places = sorted(shown, key=lambda each: (index[each[0]], each[1]))
    # Most steps have the metrics of the step before, so rows of equal keys are turned into columns
    # together.
    groups: dict[tuple[str, ...], list[int]] = {}
    spent = 0.0
    for row, place in enumerate(places):
        metrics = shown[place].metrics
        groups.setdefault(tuple(metrics), []).append(row)
        first, _ = run.steps.get(place[0], (place[1], place[1]))
        run.steps[place[0]] = (first, place[1])
        spent += sum(as_number(metrics.get(name)) or 0.0 for name in ("time/step", "time/eval"))
        run.seconds[place] = spent
    if not spent and run.times and len(run.times) == len(shown):
        start = min(run.times.values())
        run.seconds = {place: time - start for place, time in run.times.items()}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for names, rows in groups.items():
        for name, column in zip(
            names,
            zip(*(shown[places[row]].metrics.values() for row in rows), strict=True),
            strict=True,
        ):
            value, known = _column(column)
            if known.any():
                parts.setdefault(name, []).append((np.asarray(rows)[known], value[known]))
    stage = np.asarray([index[name] for name, _ in places], np.int64)
    step = np.asarray([number for _, number in places], np.int64)
    for name, each in parts.items():
        row, value = (np.concatenate(pieces) for pieces in zip(*each, strict=True))
        order = np.argsort(row, kind="stable")
        run.metrics[name] = Metric(stage[row[order]], step[row[order]], value[order])


def _column(values: Sequence[JsonValue]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of a metric, float[n] with NaN for null, and which of its values are
    numbers or null, bool[n].
    """
    if all(type(value) is float for value in values):
        return np.asarray(values, np.float64), np.ones(len(values), bool)
    numbers = [math.nan if value is None else as_number(value) for value in values]
    known = np.asarray([value is not None for value in numbers])
    return np.asarray([math.nan if value is None else value for value in numbers]), known


def _restarts(run: RecordedRun) -> list[tuple[str, int]]:
    """Returns the first (stage, step) of each attempt after the first, by their times."""
    starts = [each.start for each in run.attempts[1:] if each.start is not None]
    places = [
        next((place for place, time in run.times.items() if time >= start), None)
        for start in starts
    ]
    return [
        place
        for place in dict.fromkeys(places)
        if place is not None and place != next(iter(run.times))
    ]


def evaluation_problems(run: RecordedRun) -> int | None:
    """Returns how many problems an evaluation of the run has by its configuration, or None."""
    count = as_object(run.config.get("evaluation")).get("problems")
    return count if isinstance(count, int) and count > 0 else None


def damage_text(damage: list[Damage]) -> str:
    """Returns one line for each damaged place, at most 20, for a message."""
    more = [f"... and {len(damage) - _SHOWN} more"] if len(damage) > _SHOWN else []
    return "\n".join([*map(str, damage[:_SHOWN]), *more])
