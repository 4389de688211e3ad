"""Compares a configuration with that of the run which it continues. Free of jax.

Keys of `rl.config.changes.changeable` may differ: they hold from the next step on, and `changes`
lists what held before. Other keys under `run`, `profile` and `export` change what is kept and
shown. All other keys must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import rl.stages
from policy.json_types import JsonValue
from policy.mesh import serialization
from rewards.text import quoted
from rl.cluster.launch import on_first
from rl.config import files
from rl.config.changes import changeable, differences, in_force, stage_of
from rl.config.model import ModelOptions, TokenizerOptions
from rl.config.run import Change, RunConfig
from rl.errors import ConfigError, ModelError, ResourceError
from rl.records.run_files import EVENTS
from rl.run.load import load
from rl.run.manifest import CHECKPOINT_FOLDER, HOST, complete, examine
from rl.run.unfinished import stop
from rl.stages import kind_of
from rl.stages.scorers import reward_model_of

if TYPE_CHECKING:
    from rl.stages.stage import StageKind

AUTO = "auto"
"""The value of `model.remat` for which the run chooses a policy when it first starts."""

UNCHOSEN = {"remat": AUTO, "kept_logits_mib": None}
"""Keys of `model` that the run chooses when it first starts, with their values before."""

# Keys that may differ when a run is continued: they change what is kept and shown, and no number.
_FREE = ("run", "profile", "changes", "export")


@serialization.register_type
class PlaceOfRun(NamedTuple):
    """Where a run goes on: after `step` steps of a stage. steps: those that the stage was to have
    when they were made; None: unknown. ended: whether the stage ended with this step. until:
    whether its `until` ended it."""

    stage: int = 0
    step: int = 0
    steps: int | None = None
    ended: bool = False
    until: bool = False

    @classmethod
    def of(cls, host: dict) -> PlaceOfRun:
        """Returns the place of a checkpoint with this host.json."""
        return cls(
            host["stage"], host["step"], host.get("steps"), host["ended"], bool(host.get("until"))
        )

    def is_over(self, steps: int) -> bool:
        """Whether the stage is over if it has so many steps: more steps extend one that ended with
        its last step."""
        return self.ended and not (self.has_all_steps and self.step < steps)

    @property
    def has_all_steps(self) -> bool:
        """Whether the steps that the stage was to have are done, and `until` did not end it."""
        return self.step == self.steps and not self.until


def saved(directory: Path) -> RunConfig | None:
    """Returns the configuration of the run in this folder; None if it has not written an event."""
    file = directory / files.RESOLVED
    events = directory / EVENTS
    if file.exists() and events.exists() and events.stat().st_size:
        return load([file])
    return None


def folder_state(directory: Path) -> tuple[str | None, ...]:
    """Returns what tells whether another process has continued the run: its configuration and its
    checkpoints."""
    file = directory / files.RESOLVED
    text = file.read_text(encoding="utf-8") if file.exists() else None
    return text, *(path.name for _, path in complete(directory / CHECKPOINT_FOLDER))


def has_known_steps(config: RunConfig) -> bool:
    """Whether all stages have `steps`: those with `epochs` get them when their rows have been
    read."""
    return all(stage.steps is not None for stage in config.stages)


def continued(config: RunConfig, *, locked: bool = False) -> RunConfig:
    """Returns the configuration with all changes of its run, those that it brings included; itself
    for a new run, and for stages with `epochs`, whose steps are not known. locked: whether this
    process holds the lock of the run.

    Raises ConfigError for a key that may not change, and for one that no longer has an effect,
    ModelError if the step that the run goes on from is unknown since all checkpoints are damaged,
    ResourceError for changes of a run that another process holds.
    """
    if (
        config.run.dir is None
        or not has_known_steps(config)
        or (before := saved(config.directory)) is None
    ):
        return config
    check_same(before, config)
    if not differences(before, config):
        return config.model_copy(update={"changes": before.changes})
    if not locked and stop.in_use(config.directory):
        raise ResourceError(stop.IN_USE.format(config.directory))
    place = newest_place(config.directory)
    _check_changes(before, config, place)
    return config.model_copy(update={"changes": listed(before, config, place)})


def unchosen(model: ModelOptions) -> list[str]:
    """Lists the keys of `model` whose choice is left to the run."""
    return [key for key, value in UNCHOSEN.items() if getattr(model, key) == value]


def with_model_keys(config: RunConfig, **keys: JsonValue) -> RunConfig:
    """Returns the configuration with these keys of `model`."""
    return config.model_copy(update={"model": config.model.model_copy(update=keys)})


def with_saved_choices(config: RunConfig) -> RunConfig:
    """Returns the configuration with what its run has chosen (`UNCHOSEN`), where it leaves the
    choice to the run. The first process reads its folder."""
    keys = unchosen(config.model)
    if config.run.dir is None or not keys:
        return config
    return with_model_keys(config, **on_first(lambda: _saved_keys(config.directory, keys)))


def _saved_keys(directory: Path, keys: Sequence[str]) -> dict[str, JsonValue]:
    before = saved(directory)
    return {} if before is None else {key: getattr(before.model, key) for key in keys}


def continued_on_all(config: RunConfig) -> RunConfig:
    """Returns `continued(config)` on all processes. The first one reads the folder of the run."""
    changes = on_first(lambda: [change.model_dump() for change in continued(config).changes])
    return config.model_copy(
        update={"changes": [Change.model_validate(change) for change in changes]}
    )


def listed(before: RunConfig, config: RunConfig, place: PlaceOfRun) -> list[Change]:
    """Returns the changes of a run that goes on from a place with the values of `config`.

    What was changed after this place never held, as the steps after it are made again. After the
    last step of the run nothing holds any more.
    """
    if place.stage == len(config.stages) - 1 and place.is_over(config.stages[-1].total_steps):
        return before.changes
    position = (place.stage, place.step)
    kept = [change for change in before.changes if change.place < position]
    if not place.step:
        return kept
    held = in_force(before, *position)
    was = {
        key: old
        for key, (old, _) in differences(held, config).items()
        if (stage := stage_of(key)) is None or stage <= place.stage  # a later stage has not begun
    }
    return [*kept, Change(stage=place.stage, step=place.step, was=was)] if was else kept


def newest_place(directory: Path) -> PlaceOfRun:
    """Returns the place of the newest undamaged checkpoint of a run; that of the beginning if there
    is none.

    Raises ModelError if all are damaged.
    """
    checkpoints = complete(directory / CHECKPOINT_FOLDER)
    for _, path in checkpoints:
        manifest, wrong = examine(path, part=True)
        if manifest is not None and not wrong:
            return PlaceOfRun.of(json.loads((path / HOST).read_text()))
    if checkpoints:
        raise ModelError(
            f"{directory}: all checkpoints are damaged, so the run cannot go on. Restore "
            f"{CHECKPOINT_FOLDER} from a backup, or start a new run in another directory"
        )
    return PlaceOfRun()


def stages_of_run(config: RunConfig, places: Sequence[PlaceOfRun]) -> list[StageKind]:
    """Returns the stages of a configuration. Those that are over know it. places: those of the
    checkpoints of its run."""
    stages = rl.stages.create(config)
    for stage in stages:
        stage.is_over = bool(places) and all(
            place.stage > stage.index
            or (
                place.stage == stage.index
                and stage.options.steps is not None
                and place.is_over(stage.options.steps)
            )
            for place in places
        )
    return stages


def places(config: RunConfig) -> list[PlaceOfRun]:
    """Returns the places of all checkpoints of the run, since any of them may be damaged; none if
    one has no readable host.json."""
    if config.run.dir is None:
        return []
    try:
        return [
            PlaceOfRun.of(json.loads((path / HOST).read_text()))
            for _, path in complete(config.directory / CHECKPOINT_FOLDER)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _check_changes(before: RunConfig, config: RunConfig, place: PlaceOfRun) -> None:
    """Raises ConfigError for changes that would have no effect: in a stage that is over, or of
    steps that are done."""
    index = place.stage
    name = config.stage_names[place.stage]
    export = f"{config.directory}/export"
    changed = differences(before, config)
    for key, (old, new) in changed.items():
        if (stage := stage_of(key)) is not None and stage < index:
            raise ConfigError(
                f"{key}: {old} there, {new} here, but {config.stage_names[stage]} is over: the "
                f"run goes on after step {place.step} of {name}. Leave the key as it was, or "
                "start a new run in another run.dir"
            )
        if stage is None or kind_of(config.stages[stage]).trains_policy:
            continue
        if (written := reward_model_of(config, config.stage_names[stage])).is_dir():
            raise ConfigError(
                f"{key}: {old} there, {new} here, but {written} has been written, and a stage "
                "that has trained a reward model cannot be changed or extended. Leave the key as "
                "it was, or start a new run in another run.dir"
            )
    own = [each for each in changed if stage_of(each) == index]
    key = f"stages.{index}.steps"
    steps = config.stages[index].total_steps
    if steps < place.step:
        raise ConfigError(
            f"{key}: {steps}, but {place.step} steps of {name} are done. Set {place.step} or "
            "more, or start a new run in another run.dir"
        )
    if not (own and place.ended):
        return
    if not place.has_all_steps:
        by = (
            "its `until`"
            if place.steps is not None
            else "its `until` or its last step (the checkpoint does not say)"
        )
        raise ConfigError(
            f"{own[0]}: {name} is over, since {by} ended it after step {place.step}. To train its "
            f"weights further, give {export} to a new run as `model`"
        )
    if steps == place.step:
        raise ConfigError(
            f"{own[0]}: {name} is over, after {place.step} steps, so the change would have no "
            f"effect. Raise {key} as well, or give {export} to a new run as `model`"
        )
    if not kind_of(config.stages[index]).trains_policy:
        raise ConfigError(
            f"{key}: a stage that has trained a reward model cannot be extended; start a new run"
        )


def check_same(before: RunConfig, config: RunConfig) -> None:
    """Raises ConfigError if a key differs that may not change."""
    date = before.tokenizer and before.tokenizer.date
    if date is not None and not (
        config.tokenizer and config.tokenizer.date
    ):  # the run takes that of its first start
        tokenizer = (config.tokenizer or TokenizerOptions()).model_copy(update={"date": date})
        config = config.model_copy(update={"tokenizer": tokenizer})
    for key in unchosen(config.model):  # likewise
        config = with_model_keys(config, **{key: getattr(before.model, key)})
    for key in unchosen(before.model):  # an older version did not write it
        before = with_model_keys(before, **{key: getattr(config.model, key)})
    theirs = _fixed(before)
    ours = _fixed(config)
    different = sorted(
        key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)
    )
    if config.changes and before.changes[: len(config.changes)] != config.changes:
        different.append("changes")
        theirs["changes"] = _shown(before.changes)
        ours["changes"] = _shown(config.changes)
    if different:
        shown = "; ".join(
            f"{key}: {theirs.get(key)} there, {ours.get(key)} here" for key in different[:5]
        )
        raise ConfigError(
            f"{config.directory} holds a run with another configuration ({shown}). Continue that "
            f"one with `rl-train {quoted(config.directory)}`, or choose another run.dir"
        )


def _shown(changes: list[Change]) -> str:
    return ", ".join(f"after step {each.step} of stage {each.stage}" for each in changes) or "none"


def _fixed(config: RunConfig) -> dict[str, object]:
    """Returns every value that identifies the run and may not change, by dotted key."""
    free = changeable(config)
    flat = {}

    def walk(value: JsonValue, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, child in value.items():
                walk(child, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
            for number, child in enumerate(value):
                walk(child, f"{path}.{number}")
        elif path not in free:
            flat[path] = value

    walk(config.model_dump(mode="json", exclude=set(_FREE)), "")
    return flat
