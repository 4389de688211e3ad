"""Writes the JSON Schema of `algorithm`: a name, a preset, or a name with the options of that
algorithm."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter, defaultdict
from typing import Any

import yaml

import rl.algorithms
from rl.config.editors.json_schema import Json, SchemaWriter
from rl.config.packaged import presets


def algorithm(writer: SchemaWriter, partial: bool) -> Json:
    """Returns the schema of the value. A partial one may have options only, which any of the
    algorithms has."""
    options = {name: _options(writer, name) for name in rl.algorithms.known()}
    shared = Counter(repr(item) for each in options.values() for item in each.items())

    def by_reference(each: Json) -> Json:
        return {
            option: writer.reference(f"option-{option}", lambda schema=schema: schema)
            if _is_first(options, option, schema) and shared[repr((option, schema))] > 1
            else schema
            for option, schema in each.items()
        }

    branches: list[Json] = [{"enum": list(options)}]
    of_algorithm = _presets()
    for name, each in options.items():
        properties = by_reference(each)
        branches.append(
            writer.reference(
                f"algorithm-{name}",
                lambda name=name, properties=properties: _named(name, properties),
            )
        )
        if names := of_algorithm[name]:
            branches.append(
                writer.reference(
                    f"presets-{name}",
                    lambda name=name, names=names, properties=properties: _preset(
                        name, names, properties
                    ),
                )
            )
    if partial:
        branches.append(writer.reference("algorithm-options", lambda: _any_options(options)))
    return {"anyOf": branches}


def _is_first(options: dict[str, Json], option: str, schema: Json) -> bool:
    """Whether the first shared form of an option is this one: only one form has a definition."""
    forms = [repr(each[option]) for each in options.values() if option in each]
    return next((form for form in forms if forms.count(form) > 1), None) == repr(schema)


def _options(writer: SchemaWriter, name: str) -> Json:
    return writer.options(type(rl.algorithms.get(name)).__pydantic_fields__)


def _about(name: str) -> str:
    """Returns the first paragraph of the documentation of an algorithm's file."""
    text = inspect.cleandoc(importlib.import_module(f"rl.algorithms.{name}").__doc__ or "")
    return " ".join(text.split("\n\n")[0].split()).removesuffix(":")


def _named(name: str, options: Json) -> Json:
    properties = {"name": {"const": name, "description": _about(name)}} | options
    return {
        "type": "object",
        "required": ["name"],
        "properties": properties,
        "additionalProperties": False,
    }


def _presets() -> dict[str, list[str]]:
    """Returns the names of the presets of each algorithm."""
    result = defaultdict(list)
    for preset, file in presets().items():
        result[yaml.safe_load(file.read_text(encoding="utf-8"))["algorithm"]["name"]].append(preset)
    return result


def _preset(name: str, names: list[str], options: Json) -> Json:
    about = "options of a paper, a file of configs/presets/; other keys of the stage go first"
    own = {
        "preset": {"enum": names, "description": about},
        "name": {"const": name, "description": _about(name)},
    }
    return {
        "type": "object",
        "required": ["preset"],
        "properties": own | options,
        "additionalProperties": False,
    }


def _any_options(options: dict[str, Json]) -> Json:
    """Returns the schema of options without a name: they are merged over an algorithm of another
    file."""
    forms: dict[str, list[Any]] = defaultdict(list)
    for each in options.values():
        for option, schema in each.items():
            if schema not in forms[option]:
                forms[option].append(schema)
    properties = {
        option: schemas[0]
        if len(schemas) == 1
        else {"description": _common(schemas), "anyOf": schemas}
        for option, schemas in forms.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _common(schemas: list[Json]) -> str:
    """Returns the description of an option that several algorithms have, without a default if it
    differs."""
    texts = [schema["description"] for schema in schemas]
    return texts[0] if len(set(texts)) == 1 else texts[0].split(" Default: ")[0]
