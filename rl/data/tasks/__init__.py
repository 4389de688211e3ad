"""Problems generated in code. Every file in this folder without a leading underscore is a task of that name; any other
name is looked for in reasoning-gym (extra `tasks`). `file.py:function` and `package.module:function` name a task of the user's own:
a function (split, **options) that returns or yields mappings with `prompt`, perhaps `completion`, and columns for the rewards.

A task file defines the frozen dataclass `Options`, whose fields are the keys of `data.options`, and

    problems(options, split) -> list[Problem]     deterministic; no problem occurs in both splits

The split of a problem follows from a hash of its text (`is_held_out`), never from a seed, so that a problem that
evaluation uses can occur in no prompt and no demonstration of training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pkgutil
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from rewards import plugins
from rewards.suggest import nearest

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Problem:
    """A prompt, a demonstration of the answer (None if the task has none), and the columns for the rewards."""

    prompt: str
    completion: str | None
    columns: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """Names of the tasks of this folder, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown task or a bad option (in backticks), without generating problems."""
    if plugins.is_plugin(name):
        plugins.check_options(plugins.load(name, "task"), f"task {name}", options)
    elif name in names():
        _options(name, options)
    else:
        importlib.import_module("rl.data.tasks._reasoning_gym").check(name, options)


def problems(name: str, options: dict[str, Any], split: Split) -> list[Problem]:
    """The problems of a task's split, always the same ones in the same order. Raises ValueError as `check` does."""
    if split not in typing.get_args(Split):
        raise ValueError(f"a task has the splits {' and '.join(typing.get_args(Split))}, not {split!r}")
    if plugins.is_plugin(name):
        return [_problem(name, number, row) for number, row in enumerate(plugins.load(name, "task")(split, **options))]
    if name in names():
        return importlib.import_module(f"rl.data.tasks.{name}").problems(_options(name, options), split)
    return importlib.import_module("rl.data.tasks._reasoning_gym").problems(name, options, split)


def _problem(name: str, number: int, row: Any) -> Problem:
    if isinstance(row, Problem):
        return row
    if not isinstance(row, dict) or "prompt" not in row:
        raise ValueError(f"task {name}: problem {number} must be a mapping with `prompt`, got {row!r}")
    columns = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    return Problem(row["prompt"], row.get("completion"), columns)


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_held_out(text: str, share: float) -> bool:
    """Whether the problem that `text` identifies belongs to evaluation."""
    return hash_share(text) < share


def _options(name: str, options: dict[str, Any]):
    kind = importlib.import_module(f"rl.data.tasks.{name}").Options
    valid = [one.name for one in dataclasses.fields(kind)]
    unknown = [key for key in options if key not in valid]
    if unknown:
        raise ValueError("; ".join(f"task {name} has no option `{key}`{nearest(key, valid)}" for key in unknown))
    return kind(**options)
