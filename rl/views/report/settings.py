"""Compares configurations: what differs from the defaults, and what differs between runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from policy.json_types import JsonObject, JsonValue
from rl.config.stage_names import stage_names
from rl.views.report.read import RecordedRun

if TYPE_CHECKING:
    from pydantic import BaseModel

_NOTHING = (None, False, "", [], {})
_FREE = ("run.", "profile.")  # change what is kept and shown, and no number


def changed(config: JsonObject) -> dict[str, JsonValue]:
    """Returns the part of a saved configuration that differs from the defaults. A key of an older
    version stays."""
    from rl.config.run import RunConfig

    return _changed(config, RunConfig)


def yaml_text(value: JsonObject) -> str:
    """Returns a configuration as YAML text."""
    from rl.config import yaml_tree

    return yaml_tree.dump(dict(value)) if value else ""


def _changed(values: JsonObject, model: type[BaseModel]) -> dict[str, JsonValue]:
    from rl.config.keys import models_in

    result = {}
    for key, value in values.items():
        known = model.model_fields.get(key)
        if known is None:
            if value not in _NOTHING:
                result[key] = value
            continue
        section = next(iter(models_in(known.annotation)), (None, False))[0]
        default = None if known.is_required() else known.get_default(call_default_factory=True)
        default = list(default) if isinstance(default, tuple) else default
        if key == "algorithm" and isinstance(value, Mapping):
            result[key] = _algorithm(value)
        elif section is not None and isinstance(value, Mapping):
            inner = _changed(value, section)
            if inner or default is None:
                result[key] = inner
        elif section is not None and isinstance(value, list):
            result[key] = [
                _changed(each, section) if isinstance(each, Mapping) else each for each in value
            ]
        elif value != default:
            result[key] = value
    return result


def _algorithm(value: JsonObject) -> dict[str, JsonValue]:
    """Returns name and changed options of an algorithm; all options of one that this version does
    not know."""
    import rl.algorithms

    try:
        defaults = dataclasses.asdict(rl.algorithms.get(str(value.get("name"))))
    except Exception:  # an algorithm of a file that is gone, or of an older version
        return dict(value)
    # A default that a class computes is shown as it is: comparing it needs the arguments.
    return {
        key: each
        for key, each in value.items()
        if key == "name" or key not in defaults or each != defaults[key]
    }


@dataclasses.dataclass(frozen=True)
class RunChange:
    """A value that a run changed when it was continued. step: the first with the new value. values:
    before, after."""

    stage: str
    step: int
    key: str
    values: tuple[JsonValue, JsonValue]


def run_changes(run: RecordedRun) -> list[RunChange]:
    """Returns what the configuration of a run lists under `changes`, in order; a damaged entry is
    left out."""
    names = stage_names(run.config)
    values = dict(flat(run.config))
    result = []
    entries = run.config.get("changes")
    for entry in reversed(entries) if isinstance(entries, list) else ():
        was, stage, step = (
            (entry.get(key) for key in ("was", "stage", "step"))
            if isinstance(entry, dict)
            else [None] * 3
        )
        if (
            isinstance(was, dict)
            and isinstance(step, int)
            and isinstance(stage, int)
            and 0 <= stage < len(names)
        ):
            result = [
                RunChange(names[stage], step + 1, key, (old, values.get(key)))
                for key, old in was.items()
            ] + result
            values |= was
    return result


def flat(value: JsonValue, path: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yields (dotted key, value) of every value of a configuration."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from flat(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, child in enumerate(value):
            yield from flat(child, f"{path}.{number}")
    else:
        yield path, value


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[JsonValue]]]:
    """Returns (dotted key, value in each run) of the keys whose values differ; None where a run has
    no such key.

    Keys of `run` and `profile` are left out, and keys that a run does not have, as it has no such
    stage or is of another version of Duet, where the others have the default, null, false or an
    empty value. Where the runs have other stages, a key has the name of its stage in the place of
    the number: `stages.grpo.steps`.
    """
    stages = [stage_names(run.config) for run in runs]
    named = dict if all(each == stages[0] for each in stages) else _with_named_stages
    tables = [dict(flat(named(run.config))) for run in runs]
    chosen = {key for run in runs for key, _ in flat(named(changed(run.config)))}
    keys = dict.fromkeys(key for table in tables for key in table if not key.startswith(_FREE))
    rows = ((key, [table.get(key) for table in tables]) for key in keys)
    return [
        (key, values)
        for key, values in rows
        if any(value != values[0] for value in values)
        and (
            all(key in table for table in tables)
            or (key in chosen and any(value not in _NOTHING for value in values))
        )
    ]


def _with_named_stages(config: JsonObject) -> JsonObject:
    """Returns a configuration with its stages by name."""
    stages = config.get("stages")
    if not isinstance(stages, list):
        return config
    return {**config, "stages": dict(zip(stage_names(config), stages, strict=True))}
