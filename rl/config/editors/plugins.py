"""Makes models of the options of built-in rewards and tasks, and types of the names that a
configuration may give them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

import rewards
import rl.tasks
from rewards import registry
from rl.config.editors.files import REWARD
from rl.config.editors.json_schema import named, options_model

Plugin = Annotated[str, Field(pattern=":")]
"""`file.py:function` or `package.module:function`."""


def reward_name() -> Any:
    """Returns the type of the name of a reward. Names of installed entry points are not part of
    it."""
    names: Any = Literal[*registry.builtin_names()]
    return named(REWARD, names | Plugin)


def task_name() -> Any:
    """Returns the type of the name of a task. The tasks of reasoning-gym depend on its version."""
    other = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    names: Any = Literal[*rl.tasks.names()]
    return names | Plugin | other | None


def reward_options() -> dict[str, type[BaseModel]]:
    """Returns the name of each built-in reward -> the model of its options."""
    return {name: _of_reward(name) for name in registry.builtin_names()}


def task_options() -> dict[str, type[BaseModel]]:
    """Returns the name of each task -> the model of its options."""
    return {name: _of_task(name) for name in rl.tasks.names()}


def _of_reward(name: str) -> type[BaseModel]:
    function: Any = rewards.load(name)
    hints = typing.get_type_hints(function)
    about = inspect.getdoc(function) or ""
    fields: dict[str, Any] = {}
    for option, parameter in inspect.signature(function).parameters.items():
        if option in (*registry.TEXTS, *registry.GIVEN):
            continue
        # Columns of the data are lists; an option may replace one.
        is_column = list in (hints[option], typing.get_origin(hints[option]))
        text = re.search(rf"^{option}: (.+(?:\n(?!\w+: ).+)*)", about, re.MULTILINE)
        given: dict[str, Any] = {"default": parameter.default}
        if parameter.default is parameter.empty:  # the data may have it, so it is not required
            given = {"default_factory": str}
        if text:
            given["description"] = " ".join(text[1].split())
        fields[option] = (Any if is_column else hints[option], Field(**given))
    return options_model(f"reward-{name}", fields)


def _of_task(name: str) -> type[BaseModel]:
    module = importlib.import_module(f"rl.tasks.{name}")
    hints = typing.get_type_hints(module.Options)
    about = _attribute_docs(Path(module.__file__ or ""), "Options")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(module.Options):
        given: dict[str, Any] = {"default": field.default}
        if field.default is dataclasses.MISSING:
            given = {"default_factory": field.default_factory}
        fields[field.name] = (hints[field.name], Field(**given, description=about.get(field.name)))
    return options_model(f"task-{name}", fields)


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
