"""What the frameworks have in common: schedules, adapters, data, rewards and numbers of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from policy.json_types import JsonObject, JsonValue
from rl.imports.draft import Draft

STAGE = "stages.0"
ALGORITHM = f"{STAGE}.algorithm"
OPTIMIZER = f"{STAGE}.optimizer"
SAMPLING = f"{STAGE}.sampling"
NO_K1 = (
    "k1 is no loss: the expectation of its gradient is zero; k3 is written, and k2 has the gradient "
    "of the KL divergence"
)
_PROJECTS = {"wandb": "project", "mlflow": "experiment", "trackio": "project"}
"""Tracker -> its option for what the runs of a project have in common."""
ARCHITECTURE = "qwen3-0.6b"
ALL_LINEAR = "all-linear"
PROMPT_TOKENS = 512
"""Room for a prompt where the other framework sets no limit."""


def put_source(draft: Draft, section: str, source: str, *keys: str) -> None:
    """Writes where the weights of a section are, `model` or `teacher`; without a source an
    architecture with random weights, and what to do."""
    if source:
        draft.put(f"{section}.source", source, *keys)
        return
    draft.put(f"{section}.source", ARCHITECTURE, note=f"change: the {section} of the other run")
    draft.task(f"{section}.source: name the {section}; {ARCHITECTURE} has random weights")


def parts(draft: Draft, key: str) -> list[str]:
    """Returns the texts of a list, or of a text with commas between them."""
    return [part for text in draft.texts(key) for part in text.split(",") if part]


def put_schedule(
    draft: Draft, schedule: str, key: str, final: float | None = None, final_key: str = ""
) -> None:
    """Writes the schedule of the learning rate: `constant`, `linear` or `cosine`, down to `final`."""
    draft.put(f"{OPTIMIZER}.schedule", schedule, key)
    if final and schedule != "constant":
        draft.put(f"{OPTIMIZER}.final_fraction", final, final_key or key)


def put_warmup(
    draft: Draft,
    *,
    steps: str = "",
    ratio: str = "",
    per_step: int = 1,
    target: str = OPTIMIZER,
) -> None:
    """Writes the warm-up, in updates: of a number of updates, or of a share of all updates.

    steps, ratio: names of the keys. A `steps` below 1 is a share too (transformers 5).
    per_step: updates of a step of Duet. target: section of the optimizer.
    """
    key = steps
    value = draft.number(steps) if steps else None
    if not value or value < 0:
        key = ratio
        value = draft.number(ratio) if ratio else None
    others = [name for name in (steps, ratio) if name and name != key]
    draft.same(*others, note="another key sets the warm-up" if value else "no warm-up")
    if not value or value < 0:
        draft.same(key, note="no warm-up")
    elif key == steps and value >= 1:
        draft.put(f"{target}.warmup_steps", round(value), key, note="updates")
    elif (updates := updates_of(draft, per_step)) is not None:
        name = f"{target}.warmup_steps"
        note = f"{value:g} of {updates} updates"
        draft.put(name, math.ceil(round(value * updates, 6)), key, note=note)
    else:
        draft.change(
            key,
            note=f"no warm-up is written: {value:g} of the updates, whose number follows from the "
            "rows of the data; say --rows N",
        )


def updates_of(draft: Draft, per_step: int) -> int | None:
    """Returns the updates of the stage, or None if they depend on an unknown number of rows."""
    if (steps := draft.written_number(f"{STAGE}.steps")) is not None:
        return int(steps) * per_step
    epochs = draft.written_number(f"{STAGE}.epochs")
    batch = draft.written_number(f"{STAGE}.prompts_per_step")
    if epochs is None or not batch or draft.facts.rows is None:
        return None
    return math.ceil(epochs * draft.facts.rows / batch) * per_step


def put_adapter(
    draft: Draft,
    rank: str,
    alpha: str,
    targets: str,
    *,
    default_targets: Sequence[str] = (ALL_LINEAR,),
) -> bool:
    """Writes the adapter. Returns whether there is one: a rank above 0."""
    size = draft.integer(rank)
    if not size:
        draft.same(rank, alpha, targets, note="no adapter")
        return False
    draft.put("model.adapter.rank", size, rank)
    if (scale := draft.number(alpha)) is not None:
        draft.put("model.adapter.alpha", scale, alpha)
    names = draft.texts(targets) or list(default_targets)
    if len(names) == 1 and names[0] != ALL_LINEAR and re.fullmatch(r"[\w.*|\\]+", names[0]):
        names = names[0].split("|")
    draft.put("model.adapter.targets", ALL_LINEAR if names == [ALL_LINEAR] else names, targets)
    return True


def put_data(
    draft: Draft, paths: Sequence[str], key: str, *, section: str = "data", split: str = ""
) -> None:
    """Writes the data: one path, or a list of them."""
    if not paths:
        draft.put(f"{section}.path", "rows.jsonl", note="change: the data of the other run")
        draft.task(f"{section}.path: name the data; the other file does not say which")
        return
    if len(paths) == 1:
        draft.put(f"{section}.path", paths[0], key)
        if split:
            draft.put(f"{section}.split", split, key)
        return
    names = names_of(paths)
    entries = [
        {"path": path, "name": name, **({"split": split} if split else {})}
        for path, name in zip(paths, names, strict=True)
    ]
    draft.put(section, entries, key)


def form_of_rows(draft: Draft) -> JsonObject:
    """Returns how the rows of `data` are read, for held-out rows, which are in the same form."""
    entries = draft.written_entries("data")
    names = ("columns", "chat", "too_long")
    if entries:
        return {name: entries[0][name] for name in names if name in entries[0]}
    written = {key.removeprefix("data."): each.value for key, each in draft.values.items()}
    columns = {
        name.removeprefix("columns."): value
        for name, value in written.items()
        if name.startswith("columns.")
    }
    form = {name: written[name] for name in names[1:] if name in written}
    return form | ({"columns": columns} if columns else {})


def names_of(paths: Sequence[str]) -> list[str]:
    """Returns a name for each of several datasets: the part of the path in which they differ."""
    names = [re.sub(r"[^\w.-]", "_", PurePosixPath(path).stem) for path in paths]
    if len(set(names)) < len(names):
        parents = [re.sub(r"[^\w.-]", "_", PurePosixPath(path).parent.name) for path in paths]
        pairs = zip(parents, names, strict=True)
        names = [f"{parent}_{name}".strip("_") for parent, name in pairs]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return names


def put_rewards(
    draft: Draft, functions: list[dict[str, JsonValue]], *keys: str, note: str = ""
) -> None:
    """Writes the reward functions, or a place for them."""
    if functions:
        draft.put("rewards.functions", functions, *keys, note=note)
        return
    note = "change: the rewards of the other run"
    draft.put("rewards.functions", ["exact_answer"], note=note)
    draft.task(
        "rewards.functions: name your reward functions, file.py:function; the other file does not "
        "say which"
    )


def put_trackers(
    draft: Draft, trackers: Sequence[str], key: str, *, project: str = "", name: str = ""
) -> None:
    """Writes the trackers that Duet has too.

    key: of the trackers. project, name: keys of the names of the project and of the run, if any.
    """
    for tracker, option in _PROJECTS.items():
        if tracker in trackers:
            keys = {option: project, "name": name}
            names = {ours: draft.text(theirs) for ours, theirs in keys.items() if theirs}
            options = {ours: text for ours, text in names.items() if text}
            draft.put(f"run.{tracker}", options, *filter(None, (project, name)), key)
    if "tensorboard" in trackers:
        draft.put("run.tensorboard", True, key)
    known = (*_PROJECTS, "tensorboard", "console", "none")
    if others := [each for each in trackers if each not in known]:
        draft.leave(key, why=f"the import sets no tracker for {', '.join(others)}")


def put_lengths(draft: Draft, completion: str, prompt: str = "", total: str = "") -> None:
    """Writes the lengths of completions and of sequences."""
    new = draft.integer(completion)
    if new is not None:
        draft.put(f"{SAMPLING}.max_new_tokens", new, completion)
    total_tokens = draft.integer(total) if total else None
    before = draft.integer(prompt) if prompt else None
    if total_tokens is not None and (new is None or total_tokens > new):
        draft.put("max_length", total_tokens, total)
        if new is None:
            most = max(1, total_tokens - 1)
            draft.put(f"{SAMPLING}.max_new_tokens", most, completion, note="up to max_length")
    elif before is not None:
        sum_of = f"{before} + {new or 0}"
        draft.put("max_length", before + (new or 0), prompt, completion, note=sum_of)
    elif new is not None:
        draft.put(
            "max_length",
            PROMPT_TOKENS + new,
            completion,
            note=f"room for prompts of {PROMPT_TOKENS} tokens; longer ones are refused",
            changed=True,
        )


def put_steps(draft: Draft, steps: str, epochs: str, *, per_step: int = 1) -> None:
    """Writes the number of steps: of `steps`, in updates of which a step has `per_step`, else of
    `epochs`. A number below 1 stands for no limit."""
    number = draft.integer(steps) if steps else None
    if number is not None and number > 0:
        note = f"{number} updates, {per_step} a step" if per_step > 1 else ""
        draft.put(f"{STAGE}.steps", math.ceil(number / per_step), steps, note=note)
        draft.same(epochs, note=f"{steps} sets the steps")
        return
    draft.same(steps, note="no limit")
    passes = draft.number(epochs)
    if passes:
        draft.put(f"{STAGE}.epochs", passes if passes % 1 else int(passes), epochs)


def exact_quotient(dividend: float, divisor: float) -> int | None:
    """Returns dividend / divisor if it is an integer of at least 1, else None."""
    if not divisor or dividend < divisor or dividend % divisor:
        return None
    return int(dividend // divisor)


def dotted_function(name: str) -> str:
    """Returns `package.module.function` in Duet's form, `package.module:function`."""
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot and ":" not in name else name
