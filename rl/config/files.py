"""Merges configuration files and overrides, and validates the result. Reports all faults at once.

Layers merge from left to right: the files in their order, then the overrides `a.b=value`, whose
values are YAML without comments: a text is the full text.
Mappings merge, any other value replaces; an index changes an entry of a list (`stages.1.steps=3`).
`every_stage` of a layer merges into each stage that exists at that point, and `if_present` into the
sections that exist. Relative paths inside a file start at the working directory.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

import rl.algorithms
from rewards.suggest import nearest, nearest_path
from rewards.text import quoted
from rl.config import yaml_tree
from rl.config.keys import RENAMED, unknown_key, unknown_option
from rl.config.packaged import packaged, presets, run_names
from rl.config.run import RunConfig
from rl.config.schema import Strict, accepted_types
from rl.config.stage import OPTIMIZERS, AlgorithmOptions
from rl.config.yaml_tree import PlacedValue, Rules
from rl.errors import ConfigError, Fault, Key
from rl.remote.urls import scheme_of

RESOLVED = "config.yml"
"""Name of the resolved configuration inside a run's directory."""


def resolved_yaml(config: RunConfig) -> str:
    """Returns the full configuration, with defaults, as YAML that loads to an equal `RunConfig`."""
    return yaml_tree.dump(config.model_dump())


def changed_yaml(config: RunConfig) -> str:
    """Returns the part of the configuration that differs from the defaults, as YAML for people."""
    return yaml_tree.dump(_changed(config))


def changed_keys(config: RunConfig) -> list[str]:
    """Returns the dotted keys whose values differ from the defaults, as `stages.0.steps`."""
    result = []

    def walk(value: object, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, child in value.items():
                walk(child, f"{path}.{key}" if path else key)
        elif isinstance(value, (list, tuple)) and any(
            isinstance(child, Mapping) for child in value
        ):
            for number, child in enumerate(value):
                walk(child, f"{path}.{number}")
        else:
            result.append(path)

    walk(_changed(config), "")
    return result


def _changed(config: RunConfig) -> dict[str, Any]:
    changed = config.model_dump(exclude_defaults=True)
    for stage, shown in zip(config.stages, changed["stages"], strict=True):
        defaults = dataclasses.asdict(rl.algorithms.get(stage.algorithm.name))
        extra = stage.algorithm.model_extra or {}
        options = {key: value for key, value in extra.items() if value != defaults[key]}
        shown["algorithm"] = {"name": stage.algorithm.name} | options
        for key in ("optimizer", "critic"):
            own = OPTIMIZERS[getattr(stage, key).name]
            values = {k: v for k, v in shown.pop(key, {}).items() if k not in own or own[k] != v}
            shown |= {key: values} if values else {}
    return changed


# Layers


def merged(paths: list[str | Path], overrides: list[str]) -> PlacedValue:
    """Merges files and overrides. Raises ConfigError with all that is wrong."""
    layers = []
    run_dir = None
    problems = []
    paths = [os.path.expanduser(path) for path in paths]
    resumes = [
        os.path.expanduser(text.partition("=")[2].strip())
        for text in overrides
        if text.partition("=")[0].strip() == "resume"
    ]
    for path in [*resumes, *paths]:
        try:
            if Path(path).is_dir() or path in resumes:
                if run_dir is not None and Path(run_dir) != Path(path):
                    raise ConfigError(f"{path}: {run_dir} is continued already; one run at a time")
                run_dir = str(path)
            layers.append(_read(path, is_run=path in resumes))
        except ConfigError as error:
            problems.append(str(error))
    if not layers and not problems:
        problems.append(
            "no configuration: name a YAML file (rl-train configs/quickstart.yml) or the "
            "directory of a run"
        )
    for number, text in enumerate(overrides, start=1):
        try:
            if text.partition("=")[0].strip() != "resume":
                layers.append(_override(text, f"override {number}"))
        except ConfigError as error:
            problems.append(str(error))
    if run_dir is not None:
        layers.append(
            PlacedValue(
                {
                    "run": PlacedValue(
                        {"dir": PlacedValue(run_dir, run_dir, run_dir)}, run_dir, run_dir
                    )
                },
                run_dir,
            )
        )
    tree: PlacedValue | None = None
    for layer in layers:
        try:
            tree = _with_if_present(
                _with_every_stage(layer if tree is None else yaml_tree.merge(tree, layer, rules_at))
            )
        except ConfigError as error:
            problems.append(str(error))
    if problems or tree is None:
        raise ConfigError("\n".join(problems))
    return _with_presets(tree)


def _read(path: str | Path, is_run: bool = False) -> PlacedValue:
    file = Path(path)
    if file.is_dir() or is_run:
        if not file.is_dir():
            raise ConfigError(
                f"{path}: no such directory, so no run to continue{nearest_path(path)}"
            )
        file = file / RESOLVED
        if not file.is_file():
            raise ConfigError(
                f"{path}: a directory without {RESOLVED}, so no run to continue; name a YAML file"
            )
    if not file.exists():
        file = packaged(file) or file
    try:
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(yaml_tree.MAX_CHARACTERS + 1)
    except FileNotFoundError:
        if str(path).partition(".")[0] in RunConfig.model_fields:
            raise ConfigError(
                f"{path}: no such file; an override has a value: {path}=VALUE"
            ) from None
        if scheme_of(str(path)) is not None:
            name = quoted(f"runs/{Path(path).stem}")
            raise ConfigError(
                f"{path}: a remote folder, and a configuration is a local file. To look at the run, "
                f"`rl fetch {quoted(path)} {name}`, then name {name}; to go on with it, rl-train "
                f"FILE.yml run.dir={name} run.remote={quoted(path)}"
            ) from None
        what = "no such file" if Path(path).suffix else "no such file, and no directory of a run"
        hint = nearest_path(path) or nearest(Path(path).name, run_names())
        raise ConfigError(f"{path}: {what}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    tree = yaml_tree.parse(text, lambda line: f"{file}:{line}")
    if tree.value is None:
        raise ConfigError(f"{path}: the file is empty")
    if not isinstance(tree.value, dict):
        kind = "a list" if isinstance(tree.value, list) else "a single value"
        raise ConfigError(
            f"{tree.where}: the file holds {kind}; a configuration is a mapping of keys to values"
        )
    return _with_older_filters(tree) if _is_of_run(file) else tree


def _is_of_run(file: Path) -> bool:
    return file.name == RESOLVED and (file.parent / "events.jsonl").is_file()


def older_filters(directory: Path) -> list[int]:
    """Returns the numbers of the stages of a run whose saved configuration an older version wrote,
    without `sampling.filters`: their loss was over all ids, and stays so (`ignore`). Empty for
    anything else."""
    file = directory / RESOLVED
    try:
        if not _is_of_run(file):
            return []
        return _without_filters(
            yaml_tree.parse(file.read_text(encoding="utf-8-sig"), lambda line: f"{file}:{line}")
        )
    except (OSError, UnicodeDecodeError, ConfigError):
        return []  # `_read` reports it


def _without_filters(tree: PlacedValue) -> list[int]:
    plain = yaml_tree.plain(tree)
    stages = plain.get("stages") if isinstance(plain, dict) else None
    result = []
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        sampling = stage.get("sampling") if isinstance(stage, dict) else None
        if not isinstance(sampling, dict) or "filters" in sampling:
            continue
        if sampling.get("top_p") not in (None, 1) or sampling.get("top_k") or sampling.get("min_p"):
            result.append(index)
    return result


def _with_older_filters(tree: PlacedValue) -> PlacedValue:
    """Adds `filters: ignore` where a saved configuration of an older version filters."""
    if not (older := _without_filters(tree)):
        return tree
    every = tree.value["stages"]
    stages = list(every.value)
    for index in older:
        stage = stages[index]
        sampling = stages[index].value["sampling"]
        ignore = PlacedValue("ignore", sampling.where, sampling.key_where)
        sampling = PlacedValue(
            sampling.value | {"filters": ignore}, sampling.where, sampling.key_where
        )
        stages[index] = PlacedValue(
            stage.value | {"sampling": sampling}, stage.where, stage.key_where
        )
    return PlacedValue(
        tree.value | {"stages": PlacedValue(stages, every.where, every.key_where)},
        tree.where,
        tree.key_where,
    )


def _override(text: str, place: str) -> PlacedValue:
    key, equals, value = text.partition("=")
    key = key.strip()
    place = f"{place}: {text.strip()}"
    parts = key.split(".")
    if not equals or not all(part.strip() == part and part for part in parts):
        raise ConfigError(f"{place}: an override is key.path=value, e.g. stages.1.steps=3")
    if not value.strip():
        raise ConfigError(
            f"{place}: no value after `=`; write {key}=null for none or {key}=\"''\" for an empty "
            "text"
        )
    where = place.split(": ")[0]
    value = value.lstrip() if text.partition("=")[0].endswith(" ") else value  # `key = value`
    item = yaml_tree.typed_value(value, where)
    if isinstance(item.value, (dict, list)) and _takes_texts_only(parts):
        item = PlacedValue(value, where)
    for part in reversed(parts):
        item = PlacedValue({part: PlacedValue(item.value, where, where)}, where)
    return item


def _takes_texts_only(parts: list[str]) -> bool:
    """Tells whether the key of an override takes no value but texts (and null)."""
    if parts[0] == "every_stage":
        parts = ["stages", "0", *parts[1:]]
    elif parts[0] == "if_present":
        parts = parts[1:]
    model = _model_at(tuple(parts[:-1])) if parts else None
    field = model.model_fields.get(parts[-1]) if model is not None else None
    return field is not None and accepted_types(field.annotation) <= {str, type(None)}


def cut_texts(paths: Sequence[str | Path]) -> list[str]:
    """Returns a note for each unquoted text of the files that ends at ` #`, where YAML begins a
    comment.

    Values of keys with a list of choices are left out: what follows them is a comment.
    """
    notes = []
    for file in (Path(path).expanduser() for path in paths):
        file = (
            file / RESOLVED if file.is_dir() else file if file.exists() else packaged(file) or file
        )
        text = file.read_text(encoding="utf-8-sig")
        for path, where, value in yaml_tree.cut_texts(
            text, lambda line, file=file: f"{file}:{line}"
        ):
            if not _is_choice(path):
                dotted = ".".join(map(str, path))
                notes.append(
                    f"{where}: {dotted}: the text ends before ` #`, where a comment begins: "
                    f"{value!r}; if it goes on, quote the full text"
                )
    return notes


def _is_choice(path: tuple) -> bool:
    path = ("stages", 0, *path[1:]) if path[:1] == ("every_stage",) else path
    model = _model_at(path[:-1]) if path else None
    field = model.model_fields.get(str(path[-1])) if model is not None else None
    if field is None:
        return False
    arguments = (field.annotation, *typing.get_args(field.annotation))
    return any(typing.get_origin(one) is typing.Literal for one in arguments)


def _with_every_stage(tree: PlacedValue) -> PlacedValue:
    over = tree.value.get("every_stage")
    if over is None or over.value in (None, {}):
        return tree
    stages = tree.value.get("stages")
    if not isinstance(over.value, dict):
        raise ConfigError(f"{over.place}: every_stage: must be a mapping of the keys of a stage")
    if stages is None or not isinstance(stages.value, list):
        raise ConfigError(
            f"{over.place}: every_stage: there are no stages; name this file after the file that "
            "has them"
        )
    merged = [yaml_tree.merge(s, over, rules_at, ("stages", i)) for i, s in enumerate(stages.value)]
    rest = {key: item for key, item in tree.value.items() if key != "every_stage"}
    return PlacedValue(
        rest | {"stages": PlacedValue(merged, stages.where, stages.key_where)}, tree.where
    )


def _with_presets(tree: PlacedValue) -> PlacedValue:
    """Merges each stage whose algorithm names a preset into that file of configs/presets/."""
    stages = tree.value.get("stages")
    if stages is None or not isinstance(stages.value, list):
        return tree
    merged = [_over_preset(stage, ("stages", i)) for i, stage in enumerate(stages.value)]
    return PlacedValue(
        tree.value | {"stages": PlacedValue(merged, stages.where, stages.key_where)}, tree.where
    )


def _over_preset(stage: PlacedValue, path: tuple) -> PlacedValue:
    algorithm = stage.value.get("algorithm") if isinstance(stage.value, dict) else None
    if (
        algorithm is None
        or not isinstance(algorithm.value, dict)
        or "preset" not in algorithm.value
    ):
        return stage
    preset = algorithm.value["preset"]
    known = presets()
    if not isinstance(preset.value, str) or preset.value not in known:
        dotted = ".".join(map(str, path))
        raise ConfigError(
            f"{preset.place}: {dotted}.algorithm.preset: no preset {yaml_tree.plain(preset)!r}"
            f"{nearest(yaml_tree.plain(preset), known)}"
        )
    base = yaml_tree.parse(
        known[preset.value].read_text(encoding="utf-8"),
        lambda line: f"configs/presets/{preset.value}.yml:{line}",
    )
    own = PlacedValue(
        {key: item for key, item in algorithm.value.items() if key != "preset"},
        algorithm.where,
        algorithm.key_where,
    )
    return yaml_tree.merge(
        base,
        PlacedValue(stage.value | {"algorithm": own}, stage.where, stage.key_where),
        rules_at,
        path,
    )


def _with_if_present(tree: PlacedValue) -> PlacedValue:
    over = tree.value.get("if_present")
    if over is None or over.value in (None, {}):
        return tree
    if not isinstance(over.value, dict):
        raise ConfigError(f"{over.place}: if_present: must be a mapping of sections of a run")
    # A misspelt section is never present, so nothing else would report it.
    sections = [
        name for name in RunConfig.model_fields if name not in ("every_stage", "if_present")
    ]
    unknown = [key for key in over.value if key not in sections]
    if unknown:
        raise ConfigError(
            "\n".join(
                f"{over.value[key].place}: if_present.{key}: "
                f"{unknown_key(('if_present', key), yaml_tree.plain(over.value[key]), sections)}"
                for key in unknown
            )
        )
    present = {
        key: item
        for key, item in over.value.items()
        if key in tree.value and tree.value[key].value is not None
    }
    rest = PlacedValue(
        {key: item for key, item in tree.value.items() if key != "if_present"}, tree.where
    )
    return yaml_tree.merge(rest, PlacedValue(present, over.where), rules_at) if present else rest


def rules_at(path: tuple) -> Rules:
    """Returns how the section at `path` merges."""
    model = _model_at(path)
    if model is None or not issubclass(model, Strict):
        return Rules()
    one = model.exactly_one
    others = {
        key: {other: model.belongs_to.get(other, ()) for other in one if other != key}
        for key in one
    }
    return Rules(model.shorthand, others)


def _model_at(path: tuple) -> type[BaseModel] | None:
    """Returns the model of the schema at a path of keys and indices, or None."""
    annotation: Any = RunConfig
    for part in path:
        models = [kind for kind in accepted_types(annotation) if _is_model(kind)]
        entries = _entries_of(annotation)
        if models and str(part) in models[0].model_fields:
            annotation = models[0].model_fields[str(part)].annotation
        elif entries is not None and str(part).isdecimal():
            annotation = entries
        else:
            return None
    return next((kind for kind in accepted_types(annotation) if _is_model(kind)), None)


def _entries_of(annotation: object) -> Any:
    """Returns the type of the entries of a list, also of one among other types; None without a
    list."""
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    entries = map(_entries_of, typing.get_args(annotation))
    return next((each for each in entries if each is not None), None)


def _is_model(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


# Faults


def validate(tree: PlacedValue) -> tuple[RunConfig | None, list[Fault]]:
    """Validates a tree. Returns the configuration and its faults.

    Validates again without the refused keys, so that names and paths can be checked too. The
    configuration is None if that fails, for instance because a required key is wrong.
    """
    values = yaml_tree.plain(tree)
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        # A misspelt key is also a missing one: report the misspelling first.
        errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    faults = [fault for one in errors for fault in _faults(one)]
    if not all(_left_out(values, fault.key) for fault in faults):
        return None, faults
    try:
        return RunConfig.model_validate(values), faults
    except ValidationError:
        return None, faults


def _left_out(values: object, path: Key) -> bool:
    """Removes the key at `path` from `values`. Returns False if there is no such key."""
    for part in path[:-1]:
        if isinstance(values, dict):
            values = values[part]
        else:
            values = values[part] if isinstance(values, list) and isinstance(part, int) else None
    if not isinstance(values, dict) or not path or path[-1] not in values:
        return False
    del values[path[-1]]
    return True


def _faults(error: ErrorDetails) -> list[Fault]:
    """Returns the faults of one error of pydantic: several where a validator checks a model of its
    own."""
    path = tuple(error["loc"])
    if error["type"] != "value_error":
        return [Fault(_text(error, path), key=path)]
    cause = error.get("ctx", {})["error"]
    if isinstance(cause, ValidationError):
        inner = [fault for one in cause.errors() for fault in _faults(one)]
        return [dataclasses.replace(fault, key=path + fault.key) for fault in inner]
    return [Fault(str(cause), key=(*path, "name") if _model_at(path) is AlgorithmOptions else path)]


def _text(error: ErrorDetails, path: Key) -> str:
    """Returns what is wrong with the value at `path`, by the type of the error of pydantic."""
    kind = error["type"]
    if kind == "extra_forbidden":
        model = _model_at(path[:-1])
        if path[-1] in RENAMED:
            return f"this key is called `{RENAMED[path[-1]]}` now"
        return unknown_key(path, error["input"], list(model.model_fields) if model else [])
    if kind == "missing":
        return "this key is required"
    if kind == "too_short":
        return _empty(path, error)
    if kind == "literal_error":
        choices = (
            error.get("ctx", {})["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
        return f"must not be {error['input']!r}{nearest(error['input'], choices)}"
    if kind == "unknown_option":
        if path[-1] in RENAMED:
            return f"this option is called `{RENAMED[path[-1]]}` now"
        return unknown_option(path, error.get("ctx", {})["algorithm"])
    value = error["input"]
    if kind == "list_type" and path == ("stages",):
        return (
            f"must be a list with an entry for each stage, {_A_STAGE}, got a {type(value).__name__}"
        )
    is_plain = value is None or isinstance(value, (str, int, float, bool))
    shown = repr(value) if is_plain else f"a {type(value).__name__}"
    return f"{_MESSAGES.get(kind) or error['msg'].replace('Input should', 'must')}, got {shown}"


_A_STAGE = "such as `- {algorithm: sft, steps: 100}`"


def _empty(path: tuple, error: ErrorDetails) -> str:
    """Returns the message about a list with too few entries."""
    if path == ("stages",):
        return f"there is no stage to run; add one, {_A_STAGE}"
    least = error.get("ctx", {})["min_length"]
    count = error.get("ctx", {})["actual_length"]
    return f"has {count} entries, and needs {least} or more"


_MESSAGES = {
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "list_type": "must be a list",
    "string_type": "must be a text (quote it if it looks like a number)",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
}


def report(tree: PlacedValue, faults: list[Fault]) -> str:
    """Returns the messages of the faults, each with its `file:line`."""
    lines: dict[tuple, str] = {}
    for fault in faults:
        path = fault.key
        file = yaml_tree.locate(tree, path)
        if path[:1] == ("stages",) and path[1:]:
            text = fault.text.replace("stages.N", f"stages.{path[1]}")
        else:
            text = fault.text + " (N: number of the stage, from 0)" * ("stages.N" in fault.text)
        # Report a wrong line of `every_stage` once, not for every stage.
        key = (file, fault.text, path[2:] if path[:1] == ("stages",) else path)
        message = dataclasses.replace(fault, file=file, text=text).message()
        lines.setdefault(key, message.replace("\n", "\n    "))
    return "\n".join(lines.values())
