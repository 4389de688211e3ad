"""What every section of a run's YAML file has in common."""

from __future__ import annotations

import types
import typing
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """Unknown keys and values of another type are refused; `1e3` is a whole number where one is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    shorthand: ClassVar[str | None] = None
    """Key for which a plain text stands: `model: tiny` is `model: {source: tiny}`."""

    @model_validator(mode="before")
    @classmethod
    def _as_people_write(cls, values):
        if isinstance(values, str) and cls.shorthand:
            return {cls.shorthand: values}
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, field in cls.model_fields.items():
            value, kinds = values.get(name), accepted_types(field.annotation)
            if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
                values[name] = int(value)
            # A section left empty (`optimizer:` with every line below commented out) is the section's defaults.
            elif name in values and value is None and type(None) not in kinds and not kinds <= {int, float, bool, str}:
                del values[name]
        return values


def accepted_types(annotation: Any) -> set[Any]:
    """The members of a union, or the type itself; `list[int]` counts as list."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for member in typing.get_args(annotation) for kind in accepted_types(member)}
    if typing.get_origin(annotation) is Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    return {typing.get_origin(annotation) or annotation}
