"""Settings that a run changed while it went on: which keys may change, and what held at a step.

The stages of a configuration hold the newest values. An entry of `changes` holds the values before
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from policy.json_types import JsonObject
from rl.config.run import Change, RunConfig
from rl.errors import Fault, Key

RATES = ("learning_rate", "schedule", "warmup_steps", "final_fraction")
"""Keys of an optimizer that a continued run may change."""

INTERVALS = (
    "evaluation.every",
    "run.samples.every",
    "run.samples.share",
    "run.checkpoint_every",
    "run.log_every",
)


def changeable(config: RunConfig) -> dict[str, Any]:
    """Returns the values of all keys that a continued run may change, by dotted key."""
    keys = [key for key in INTERVALS if key != "evaluation.every" or config.evaluation is not None]
    for index in range(len(config.stages)):
        keys += [f"stages.{index}.steps"]
        keys += [f"stages.{index}.held_out.every"] * (config.stages[index].held_out is not None)
        keys += [
            f"stages.{index}.{optimizer}.{rate}"
            for optimizer in ("optimizer", "critic")
            for rate in RATES
        ]
    return {key: value_of(config, key) for key in keys}


def value_of(config: RunConfig, key: str) -> Any:
    """Returns the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


def stage_of(key: str) -> int | None:
    """Returns the index of the stage that a dotted key belongs to; None: it belongs to none."""
    parts = key.split(".")
    return int(parts[1]) if parts[0] == "stages" else None


def in_force(config: RunConfig, stage: int, step: int) -> RunConfig:
    """Returns the configuration with the values that hold in a step, counted from 1, of a stage.

    A change after step n holds from step n + 1 on. Raises ValueError for a value that its key does
    not take.
    """
    for change in reversed([each for each in config.changes if each.place >= (stage, step)]):
        config = _with_values(config, change.was)
    return config


def boundaries(config: RunConfig, stage: int) -> set[int]:
    """Returns the steps of a stage after which settings change."""
    return {change.step for change in config.changes if change.stage == stage}


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns key -> (value before, value after) of the keys of `changeable` that differ."""
    old = changeable(before)
    new = changeable(after)
    return {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}


def notes(config: RunConfig, stage: int, step: int) -> list[str]:
    """Returns a line for each key that changes after this step of the stage."""
    before = in_force(config, stage, step)
    after = in_force(config, stage, step + 1)
    name = config.stage_names[stage]
    return [
        f"from step {step + 1} of {name} on: {key}: {old} -> {new}"
        for key, (old, new) in differences(before, after).items()
    ]


def faults(config: RunConfig) -> Iterator[Fault]:
    """Yields what is wrong with the list `changes`: its order, keys that may not change, and old
    values that do not go with the rest."""
    changes: Sequence[Change] = config.changes
    wrong = list(_order_faults(config, changes))
    for number, change in enumerate(changes):
        wrong += _key_faults(config, change, ("changes", number, "was"))
    yield from wrong
    if wrong:
        return
    for number in reversed(range(len(changes))):
        change = changes[number]
        path = ("changes", number)
        try:
            config = _with_values(config, change.was)
        except ValueError as error:
            yield Fault(str(error), key=(*path, "was"))
            return
        if change.step > (steps := config.stages[change.stage].total_steps):
            yield Fault(f"{change.step}, but the stage had {steps} steps then", key=(*path, "step"))


def _order_faults(config: RunConfig, changes: Sequence[Change]) -> Iterator[Fault]:
    before = (-1, 0)
    for number, change in enumerate(changes):
        path = ("changes", number)
        if change.stage >= len(config.stages):
            yield Fault(
                f"there is no stage {change.stage}; leave the change out", key=(*path, "stage")
            )
        elif (steps := config.stages[change.stage].steps) is None:
            yield Fault(
                f"stages.{change.stage} has `epochs`, and changes go with `steps`; leave the "
                "change out",
                key=(*path, "stage"),
            )
        elif change.step > steps:
            yield Fault(
                f"{change.step}, but stages.{change.stage}.steps is {steps}; leave the change out",
                key=(*path, "step"),
            )
        if change.place <= before:
            yield Fault(
                "changes stand in the order of their stages and steps, one for a step", key=path
            )
        before = change.place


def _key_faults(config: RunConfig, change: Change, path: Key) -> Iterator[Fault]:
    allowed = changeable(config)
    for key in change.was:
        if key not in allowed:
            yield Fault(
                "a run that goes on does not change this key (docs/resume.md says which may "
                "change)",
                key=(*path, key),
            )
        elif stage_of(key) not in (None, change.stage):
            yield Fault(
                f"a change in stage {change.stage} has keys of this stage only", key=(*path, key)
            )


def _with_values(config: RunConfig, values: JsonObject) -> RunConfig:
    tree = config.model_dump()
    for key, value in values.items():
        *path, last = key.split(".")
        section: Any = tree
        for part in path:
            section = section[int(part)] if isinstance(section, list) else section[part]
        section[last] = value
    try:
        return type(config).model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
        ) from None
