"""Any task of reasoning-gym by name (https://github.com/open-thought/reasoning-gym), with its own scorer as reward.

`options` are the task's own configuration, and besides

    size: problems of the training split (10000); evaluation has `eval_size` (1000)

Both splits are generated from seeds of their own; a problem whose text hashes into the held-out tenth is left to
evaluation, the rest to training, so that the splits share none even where a task has few distinct problems.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from rewards.suggest import nearest
from rl.data.tasks import Problem, Split, is_held_out, names

_EVAL_SHARE = 0.1
_SEEDS = {"train": 0, "eval": 1_000_003}
_OWN_OPTIONS = {"size": 10_000, "eval_size": 1_000}


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown task, a bad option, or where reasoning-gym is not installed."""
    _configured(name, options, "train", 1)


def problems(name: str, options: dict[str, Any], split: Split) -> list[Problem]:
    """`size` (train) or `eval_size` (eval) distinct problems, fewer where the task has no more."""
    wanted = (_OWN_OPTIONS | options)["eval_size" if split == "eval" else "size"]
    # One in ten lands in the held-out part, duplicates are dropped, and a task with few problems must come to an end.
    dataset = _configured(name, options, split, wanted * (30 if split == "eval" else 3))
    found: dict[str, Problem] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        question = entry["question"]
        if question in found or is_held_out(question, _EVAL_SHARE) != (split == "eval"):
            continue
        columns = {"task": name, "entry": json.dumps(entry, default=str), "answer": entry["answer"]}
        found[question] = Problem(question, entry["answer"], columns)
        if len(found) == wanted:
            break
    return list(found.values())


def _configured(name: str, options: dict[str, Any], split: Split, size: int):
    try:
        # Importing it prints notices of optional packages.
        with contextlib.redirect_stdout(io.StringIO()):
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"no task {name}{nearest(name, names())}; the tasks of reasoning-gym need pip install 'duet-rl[tasks]' ({error})"
        ) from None
    if name not in DATASETS:
        raise ValueError(f"no task {name}, neither own nor of reasoning-gym{nearest(name, [*names(), *DATASETS])}")
    valid = [one.name for one in dataclasses.fields(DATASETS[name][1]) if one.name != "seed"]
    for key in options:
        if key not in valid and key not in _OWN_OPTIONS:
            raise ValueError(f"task {name} has no option `{key}`{nearest(key, [*valid, 'eval_size'])}")
    for key in _OWN_OPTIONS:
        if type(options.get(key, 1)) is not int or options.get(key, 1) < 1:
            raise ValueError(f"`{key}` must be a whole number of at least 1, got {options[key]!r}")
    own = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    try:
        return reasoning_gym.create_dataset(name, **own, seed=_SEEDS[split], size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {name}: {error or 'its options do not fit each other'}") from error
