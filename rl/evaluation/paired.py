"""Compares models on the same problems: reads the folders of two evaluations. Free of jax."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policy.json_types import JsonObject, JsonValue
from rl.errors import DataError
from rl.evaluation.files import PROBLEMS
from rl.evaluation.tables import Table, aligned
from rl.records.run_files import Damage, json_lines
from rl.statistics import Estimate, mean, paired_difference

Place = tuple[str, str, int]
"""(task, key of the problem, how many problems with this key come before it)."""


@dataclass(frozen=True)
class Difference:
    """A score of a task in two evaluations, on the problems that both have. by: after less
    before."""

    task: str
    score: str
    before: Estimate
    after: Estimate
    by: Estimate


@dataclass(frozen=True)
class MeasuredProblem:
    """A problem as problems.jsonl has it. right: score -> share of its samples. counts: score ->
    how often it counts, of those where that is not once."""

    right: Mapping[str, float | None]
    counts: Mapping[str, float]


def read(folder: Path) -> dict[Place, MeasuredProblem]:
    """Returns the problems of the tasks that an evaluation has completed. Raises DataError for a
    damaged file."""
    damage: list[Damage] = []
    seen: Counter[tuple[str, str]] = Counter()
    result = {}
    for number, row in json_lines(folder / PROBLEMS, damage):
        try:
            name = row["task"], row["key"]
            result[(*name, seen[name])] = MeasuredProblem(row["right"], row["counts"])
        except (KeyError, TypeError):
            raise DataError(f"{folder / PROBLEMS}:{number}: damaged; evaluate again") from None
        seen[name] += 1
    if damage:
        raise DataError(f"{damage[0]}")
    return result


def differences(before: Path, after: Path) -> list[Difference]:
    """Returns the difference of each score of each task on the problems that both folders have."""
    first = read(before)
    second = read(after)
    shared: dict[tuple[str, str], list[Place]] = {}
    for place, problem in first.items():
        other = second.get(place)
        for score in problem.right if other is not None else ():
            if other is not None and score in other.right:
                shared.setdefault((place[0], score), []).append(place)
    return [
        each
        for (task, score), places in shared.items()
        if (
            each := _difference(
                task, score, [first[p] for p in places], [second[p] for p in places]
            )
        )
    ]


def _difference(
    task: str, score: str, before: Sequence[MeasuredProblem], after: Sequence[MeasuredProblem]
) -> Difference | None:
    """Compares a score on the problems that both evaluations scored; None without one."""
    pairs = [
        (one.right[score], other.right[score], one.counts.get(score, 1.0))
        for one, other in zip(before, after, strict=True)
    ]
    scored = [(one, other, n) for one, other, n in pairs if one is not None and other is not None]
    if not scored:
        return None
    ones, others, weights = (list(each) for each in zip(*scored, strict=True))
    first = mean(ones, weights)
    second = mean(others, weights)
    by = paired_difference(ones, others, weights)
    assert first and second and by
    return Difference(task, score, first, second, by)


def text(names: Sequence[str], folders: Sequence[Path], contents: Sequence[JsonObject]) -> str:
    """Returns the differences and the settings that differ as tables. Raises DataError."""
    changed = settings(names, contents)
    shown = aligned(changed) if changed.rows else "settings: none differs"
    return f"{aligned(compared(names, folders))}\n\n{shown}"


def compared(names: Sequence[str], folders: Sequence[Path]) -> Table:
    """Returns the differences of each further evaluation from the first. Raises DataError where
    none has a problem in common with it."""
    rows = [
        [each.task, each.score, name, *cells(each)]
        for name, folder in zip(names[1:], folders[1:], strict=True)
        for each in differences(folders[0], folder)
    ]
    if not rows:
        raise DataError(
            f"{', '.join(map(str, folders))}: no problem in common. Complete the evaluations "
            "(the same `rl eval` commands continue them), with the same tasks and rows"
        )
    rest = ["difference", "95% interval", "n"]
    if len(folders) == 2:
        rows = [[*row[:2], *row[3:]] for row in rows]
        return Table(["task", "score", *names, *rest], rows)
    return Table(["task", "score", "compared", names[0], "its accuracy", *rest], rows)


def cells(each: Difference) -> list[str]:
    """Returns before, after, their difference, its interval, and the number of problems."""
    by = each.by
    return [
        f"{each.before.value:.3f}",
        f"{each.after.value:.3f}",
        f"{by.value:+.3f}",
        f"{by.low:+.3f} to {by.high:+.3f}",
        str(by.n),
    ]


def changed_settings(contents: Sequence[JsonObject]) -> list[tuple[str, list[JsonValue]]]:
    """Returns (key, value in each) of the settings of eval.json that differ between evaluations of
    the same tasks, the model included."""
    tables = [dict(_settings(content)) for content in contents]
    keys = dict.fromkeys(key for table in tables for key in table)
    shared = [
        key for key in keys if key.startswith("model.") or all(key in table for table in tables)
    ]
    rows = [(key, [table.get(key) for table in tables]) for key in shared]
    return [(key, values) for key, values in rows if any(each != values[0] for each in values)]


def _settings(content: JsonObject) -> Iterator[tuple[str, JsonValue]]:
    model = content.get("model")
    for key, value in model.items() if isinstance(model, dict) else ():
        yield f"model.{key}", value
    tasks = content.get("tasks")
    for name, task in tasks.items() if isinstance(tasks, dict) else ():
        settings = task.get("settings") if isinstance(task, dict) else None
        for key, value in settings.items() if isinstance(settings, dict) else ():
            yield f"{name}.{key}", value


def settings(names: Sequence[str], contents: Sequence[JsonObject]) -> Table:
    """Returns the settings that differ between evaluations, by name."""
    rows = [[key, *map(_short, values)] for key, values in changed_settings(contents)]
    return Table(["setting", *names], rows)


def _short(value: JsonValue) -> str:
    shown = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
