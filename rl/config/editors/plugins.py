"""Writes the JSON Schema of what a configuration names: rewards and tasks, with the options of
those that are built in.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import rewards
import rl.tasks
from rewards import registry
from rl.config.editors.json_schema import Json, SchemaWriter

PLUGIN: Json = {"type": "string", "pattern": ":"}
"""`file.py:function` or `package.module:function`."""


def reward_name() -> Json:
    """Returns the schema of the name of a reward. Names of installed entry points are not part of
    it."""
    return {"anyOf": [{"enum": registry.builtin_names()}, PLUGIN]}


def task_name() -> Json:
    """Returns the schema of the name of a task. The tasks of reasoning-gym depend on its
    version."""
    other = {"type": "string", "pattern": r"^[a-z][a-z0-9_]*$"}
    return {"anyOf": [{"enum": rl.tasks.names()}, PLUGIN, other]}


def add_options(writer: SchemaWriter) -> None:
    """Adds the options of each built-in reward and task to the sections that name one."""
    sections = {
        "RewardOptions": (
            "name",
            {name: _reward_options(writer, name) for name in registry.builtin_names()},
        ),
        "DataOptions": ("task", {name: _task_options(writer, name) for name in rl.tasks.names()}),
    }
    for section, (key, options) in sections.items():
        for name in (section, f"{section}-partial"):
            if name in writer.definitions:
                writer.definitions[name]["allOf"] = [
                    _if_named(key, *item) for item in options.items()
                ]


def _if_named(key: str, name: str, options: Json) -> Json:
    accepted = {"type": ["object", "null"], "properties": options, "additionalProperties": False}
    return {
        "if": {"required": [key], "properties": {key: {"const": name}}},
        "then": {"properties": {"options": accepted}},
    }


def _reward_options(writer: SchemaWriter, name: str) -> Json:
    function: Any = rewards.load(name)
    hints = typing.get_type_hints(function)
    about = inspect.getdoc(function) or ""
    result = {}
    for option, parameter in inspect.signature(function).parameters.items():
        # Columns of the data are lists; an option may replace one.
        if option in (*registry.TEXTS, *registry.GIVEN):
            continue
        is_column = typing.get_origin(hints.get(option)) is list or hints.get(option) is list
        result[option] = {} if is_column else writer.annotation(hints[option], False)
        if text := re.search(rf"^{option}: (.+(?:\n    .+)*)", about, re.MULTILINE):
            result[option] = {"description": " ".join(text[1].split())} | result[option]
        if parameter.default is not parameter.empty:
            result[option]["default"] = parameter.default
    return result


def _task_options(writer: SchemaWriter, name: str) -> Json:
    module = importlib.import_module(f"rl.tasks.{name}")
    hints = typing.get_type_hints(module.Options)
    about = _attribute_docs(Path(module.__file__ or ""), "Options")
    result = {}
    for field in dataclasses.fields(module.Options):
        schema = writer.annotation(hints[field.name], False)
        if field.name in about:
            schema = {"description": about[field.name]} | schema
        if field.default is not dataclasses.MISSING:
            schema["default"] = field.default
        result[field.name] = schema
    return result


def _attribute_docs(file: Path, name: str) -> dict[str, str]:
    """Returns field -> the text under it, of a class in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    result = {}
    for field, text in zip(body, body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            result[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return result
