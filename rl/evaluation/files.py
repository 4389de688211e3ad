"""Names of the files of an evaluation, and whether a folder is one. Imports neither numpy nor
jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.records.run_files import Damage, read_json

RESULTS = "eval.json"
PROBLEMS = "problems.jsonl"


def content(folder: Path, damage: list[Damage]) -> dict[str, Any]:
    """Returns eval.json of a folder; {} for the folder of a run."""
    return read_json(folder / RESULTS, damage)


def results(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the tasks of eval.json that are complete, by name."""
    tasks = content.get("tasks")
    entries = tasks.items() if isinstance(tasks, dict) else ()
    return {name: task for name, task in entries if isinstance(task, dict) and "scores" in task}
