"""Names of the files of an evaluation, and whether a folder is one. Imports neither numpy nor
jax."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, cast

from policy.json_types import JsonObject, JsonValue
from rl.records.run_files import Damage, read_json

RESULTS = "eval.json"
PROBLEMS = "problems.jsonl"


class EstimateEntry(TypedDict):
    """A number of eval.json with its interval, over n problems."""

    value: float
    low: float
    high: float
    n: int


ScoreEntry = TypedDict(
    "ScoreEntry",
    {
        "accuracy": EstimateEntry | None,
        "pass": dict[str, EstimateEntry],
        "maj": dict[str, EstimateEntry],
        "unscored": int,
        "by": dict[str, dict[str, EstimateEntry | None]],
    },
)
"""A score of eval.json. pass, maj: by k. by: column -> value -> accuracy."""


class TaskEntry(TypedDict):
    """A complete task of eval.json."""

    about: str
    settings: JsonObject
    problems: int
    samples: int
    truncated: float
    scores: dict[str, ScoreEntry]


def content(folder: Path, damage: list[Damage]) -> dict[str, JsonValue]:
    """Returns eval.json of a folder; {} for the folder of a run."""
    return read_json(folder / RESULTS, damage)


def results(content: JsonObject) -> dict[str, TaskEntry]:
    """Returns the tasks of eval.json that are complete, by name."""
    tasks = content.get("tasks")
    entries = tasks.items() if isinstance(tasks, dict) else ()
    return {
        name: cast(TaskEntry, task)
        for name, task in entries
        if isinstance(task, dict) and "scores" in task
    }
