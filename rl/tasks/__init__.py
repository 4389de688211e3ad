"""Generates problems. Every file in this folder without a leading underscore is a task of that
name; any other name is a task of reasoning-gym (extra `tasks`). `file.py:function` and
`package.module:function` name the user's own task: a function (split, **options) that returns or
yields mappings with `prompt`, optionally `completion`, and columns for the rewards.

A task file defines the frozen dataclass `Options`, whose fields are the keys of `data.options`, and

    problems(options, split) -> list[TaskProblem]   deterministic; no problem occurs in both splits

A hash of its text decides the split of a problem (`is_held_out`), not a seed, so that no problem of
the evaluation occurs in training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pkgutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rewards import plugins
from rewards.suggest import nearest

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class TaskProblem:
    """A prompt, a demonstration of its answer (None if the task has none), and the columns for
    rewards."""

    prompt: str
    completion: str | None
    columns: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """Returns the names of the tasks of this folder, sorted."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )


def check(name: str, options: Mapping[str, object]) -> None:
    """Raises ValueError for an unknown task or a bad option (in backticks), without generating
    problems."""
    if plugins.is_plugin(name):
        plugins.check_options(plugins.load(name, "task"), f"task {name}", options)
    elif name in names():
        _options(name, options)
    else:
        importlib.import_module("rl.tasks._reasoning_gym").check(name, options)


def problems(name: str, options: Mapping[str, object], split: Split) -> list[TaskProblem]:
    """Returns the problems of a split, always the same in the same order. Raises ValueError as
    `check` does."""
    if split not in typing.get_args(Split):
        raise ValueError(
            f"a task has the splits {' and '.join(typing.get_args(Split))}, not {split!r}"
        )
    if plugins.is_plugin(name):
        return [
            _problem(name, number, row)
            for number, row in enumerate(plugins.load(name, "task")(split, **options))
        ]
    if name in names():
        return importlib.import_module(f"rl.tasks.{name}").problems(_options(name, options), split)
    return importlib.import_module("rl.tasks._reasoning_gym").problems(name, options, split)


def _problem(name: str, number: int, row: object) -> TaskProblem:
    if isinstance(row, TaskProblem):
        return row
    if not isinstance(row, dict) or "prompt" not in row:
        raise ValueError(
            f"task {name}: problem {number} must be a mapping with `prompt`, got {row!r}"
        )
    columns = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    return TaskProblem(row["prompt"], row.get("completion"), columns)


def hash_share(text: str) -> float:
    """Returns a number in [0, 1) that depends on the text only, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_held_out(text: str, share: float) -> bool:
    """Tells whether the problem that `text` identifies belongs to the evaluation."""
    return hash_share(text) < share


def _options(name: str, options: Mapping[str, object]) -> Any:
    kind = importlib.import_module(f"rl.tasks.{name}").Options
    valid = [one.name for one in dataclasses.fields(kind)]
    unknown = [key for key in options if key not in valid]
    if unknown:
        raise ValueError(
            "; ".join(f"task {name} has no option `{key}`{nearest(key, valid)}" for key in unknown)
        )
    return kind(**options)
