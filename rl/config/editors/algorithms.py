"""Makes the type of `algorithm`: a name, or a name or preset with the options of that algorithm."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

import rl.algorithms
from rl.config.editors.json_schema import options_model
from rl.config.packaged import presets

_PRESET = "options of a paper, a file of configs/presets/; other keys of the stage go first"

_Form = tuple[Any, FieldInfo]
"""The type of an option, and its field."""


def algorithm() -> Any:
    """Returns the type of the value in a complete configuration."""
    names = rl.algorithms.known()
    return Union[Literal[*names], *(_named(name) for name in names), *_presets()]  # noqa: UP007


def algorithm_part() -> Any:
    """Returns the type of the value in a part of a run: options alone are merged over an algorithm
    of another file."""
    return algorithm() | options_model("algorithm-options", _of_any())


def _named(name: str) -> type[BaseModel]:
    fields = {"name": (Literal[name], Field(description=_about(name)))}
    return options_model(f"algorithm-{name}", fields | _options(name))


def _presets() -> list[type[BaseModel]]:
    names = defaultdict(list)
    for preset, file in presets().items():
        names[yaml.safe_load(file.read_text(encoding="utf-8"))["algorithm"]["name"]].append(preset)
    return [_preset(name, own) for name, own in sorted(names.items())]


def _preset(name: str, own: list[str]) -> type[BaseModel]:
    fields = {
        "preset": (Literal[*own], Field(description=_PRESET)),
        # A factory: no default is shown, and the key is not required.
        "name": (Literal[name], Field(default_factory=str, description=_about(name))),
    }
    return options_model(f"presets-{name}", fields | _options(name))


def _options(name: str) -> dict[str, _Form]:
    """Returns the options of an algorithm: key -> (type, field)."""
    fields = type(rl.algorithms.get(name)).__pydantic_fields__
    return {key: (field.annotation, field) for key, field in fields.items()}


def _about(name: str) -> str:
    """Returns the first paragraph of the documentation of an algorithm's file."""
    text = inspect.cleandoc(importlib.import_module(f"rl.algorithms.{name}").__doc__ or "")
    return " ".join(text.split("\n\n")[0].split()).rstrip(":.")


def _of_any() -> dict[str, _Form]:
    """Returns the options of all algorithms. One that several have accepts what any of them does,
    and has a default if all have this one."""
    forms: dict[str, list[_Form]] = defaultdict(list)
    for name in rl.algorithms.known():
        for key, (annotation, field) in _options(name).items():
            forms[key].append((annotation, field))
    return {key: _joined(each) for key, each in forms.items()}


def _joined(forms: list[_Form]) -> _Form:
    """Returns a field that accepts what any of the fields does."""
    annotation, first = forms[0]
    types = {_with_bounds(*form): None for form in forms}
    defaults = {repr(field.default) for _, field in forms}
    if len(types) == len(defaults) == 1:
        return annotation, first
    field: Any = Field(default_factory=str, description=first.description)
    return Union[*types], field  # noqa: UP007


def _with_bounds(annotation: object, field: FieldInfo) -> Any:
    return Annotated[annotation, *field.metadata] if field.metadata else annotation
