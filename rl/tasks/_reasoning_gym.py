"""Generates the problems of any reasoning-gym task (https://github.com/open-thought/reasoning-gym).

`options` are the configuration of the task, and

    size: number of training problems (10000)
    eval_size: number of evaluation problems (1000)

Each split has its own seed. A problem whose text hashes into the held-out tenth belongs to the
evaluation, any other to training, so that the splits share no problem even if a task has few
distinct ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from rewards.suggest import nearest
from rl.tasks import Split, TaskProblem, is_held_out, names

_EVAL_SHARE = 0.1
_SEEDS = {"train": 0, "eval": 1_000_003}
_OWN_OPTIONS = {"size": 10_000, "eval_size": 1_000}


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown task, a bad option, or if reasoning-gym is not installed."""
    _configured(name, options, "train", 1)


def problems(name: str, options: dict[str, Any], split: Split) -> list[TaskProblem]:
    """Returns `size` (train) or `eval_size` (eval) distinct problems, fewer if the task has
    fewer."""
    size = (_OWN_OPTIONS | options)["eval_size" if split == "eval" else "size"]
    # One problem in ten is held out and duplicates are dropped. The bound ends the loop for a task
    # with few problems.
    dataset = _configured(name, options, split, size * (30 if split == "eval" else 3))
    distinct: dict[str, TaskProblem] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        question = entry["question"]
        if question in distinct or is_held_out(question, _EVAL_SHARE) != (split == "eval"):
            continue
        columns = {"task": name, "entry": json.dumps(entry, default=str), "answer": entry["answer"]}
        distinct[question] = TaskProblem(question, entry["answer"], columns)
        if len(distinct) == size:
            break
    return list(distinct.values())


def _configured(name: str, options: dict[str, Any], split: Split, size: int) -> Any:
    """Returns the dataset of a task. Raises ValueError as `check` does."""
    try:
        # The import prints notices about optional packages.
        with contextlib.redirect_stdout(io.StringIO()):
            import reasoning_gym  # pyright: ignore[reportMissingImports]
            from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"no task {name}{nearest(name, names())}; "
            f"the tasks of reasoning-gym need pip install 'duet-rl[tasks]' ({error})"
        ) from None
    if name not in DATASETS:
        raise ValueError(
            f"no task {name}, neither own nor of "
            f"reasoning-gym{nearest(name, [*names(), *DATASETS])}"
        )
    valid = [one.name for one in dataclasses.fields(DATASETS[name][1]) if one.name != "seed"]
    for key in options:
        if key not in valid and key not in _OWN_OPTIONS:
            raise ValueError(
                f"task {name} has no option `{key}`{nearest(key, [*valid, 'eval_size'])}"
            )
    for key in _OWN_OPTIONS:
        if type(options.get(key, 1)) is not int or options.get(key, 1) < 1:
            raise ValueError(f"`{key}` must be an integer of at least 1, got {options[key]!r}")
    own = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    try:
        return reasoning_gym.create_dataset(name, **own, seed=_SEEDS[split], size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {name}: {error or 'its options do not fit each other'}") from error
