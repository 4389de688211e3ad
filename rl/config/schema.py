"""Defines the base class of the sections of a run's YAML file."""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from policy.json_types import JsonValue


def with_home(value: object) -> Any:
    """Returns a path, or the paths of a list, with the home directory for `~`; any other value
    unchanged."""
    if isinstance(value, list):
        return [with_home(one) for one in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _finite(value: object, name: str = "") -> object:
    """Returns the value. Raises ValueError if it, or a value inside it, is a number that is not
    finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: {value} is no finite number")
    for key, one in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value if isinstance(value, list) else ())
    ):
        _finite(one, f"{name}.{key}".removeprefix("."))
    return value


FINITE = AfterValidator(lambda mapping: _finite(mapping))
"""Annotation of a mapping with keys of its own, whose numbers are finite."""

HOME = AfterValidator(with_home)
"""Annotation of every key that holds a path, or a name that may be one: `~` is the home
directory."""


class Strict(BaseModel):
    """A section that refuses unknown keys, values of another type and numbers that are not finite.
    It accepts `1e3` as an integer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """Key that a plain text sets: `model: tiny` is `model: {source: tiny}`."""
    exactly_one: ClassVar[tuple[str, ...]] = ()
    """Keys of which exactly one must be set; `null` does not set a key. One that a later layer sets
    replaces the other.
    """
    belongs_to: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Key of `exactly_one` -> keys that say more about it, and go with it when another one replaces
    it."""

    @model_validator(mode="before")
    @classmethod
    def _as_people_write(cls, values: object) -> object:
        if isinstance(values, str) and cls.shorthand:
            return {cls.shorthand: values}
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, field in cls.model_fields.items():
            value = values.get(name)
            kinds = accepted_types(field.annotation)
            if name in values:
                values[name] = as_integer(value, kinds)
            # A section left empty (`optimizer:` with every line below commented out) is the
            # section's defaults.
            if (
                name in values
                and value is None
                and type(None) not in kinds
                and not kinds <= {int, float, bool, str}
            ):
                del values[name]
        return values

    @model_validator(mode="after")
    def _exactly_one(self):
        if (
            self.exactly_one
            and sum(getattr(self, name) is not None for name in self.exactly_one) != 1
        ):
            raise ValueError(
                f"give exactly one of {' and '.join(f'`{name}`' for name in self.exactly_one)}"
            )
        return self


def as_integer(value: object, kinds: set[object]) -> object:
    """Returns `1e3` as an integer if the types of a key include int and not float; any other value
    unchanged."""
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    return value


def accepted_types(annotation: object) -> set[object]:
    """Returns the members of a union, or the type itself; `list[int]` counts as list."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for member in typing.get_args(annotation) for kind in accepted_types(member)}
    if typing.get_origin(annotation) is Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    return {typing.get_origin(annotation) or annotation}


class Section(Strict):
    """A section whose keys are declared at the component that reads them, see `fields_of`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


TypedField = tuple[object, object]
"""The type of a key, and its pydantic field, which `Field` types as the value of the key."""
AnySection = TypeVar("AnySection", bound=Section)


def fields_of(
    component: type, *, leave_out: Iterable[str] = (), **defaults: JsonValue
) -> Callable[[type[AnySection]], type[AnySection]]:
    """Class decorator: gives a section the options of a component, each with its default,
    description and bounds.

    Args:
        component: a dataclass whose options are declared with `policy.options.option`. Other fields
        are no keys. leave_out: options of the component that are no keys of the section.
        defaults: other defaults for a run.

    Raises:
        TypeError: for a name in `leave_out` or `defaults` that is no option of the component.
    """
    options = {
        field.name: field
        for field in dataclasses.fields(component)
        if "description" in field.metadata
    }
    if unknown := {*leave_out, *defaults} - options.keys():
        raise TypeError(f"{component.__name__} has no option {', '.join(sorted(unknown))}")

    def complete(section: type[AnySection]) -> type[AnySection]:
        keys: dict[str, TypedField] = {}
        for name, field in options.items():
            if name in leave_out or name in section.model_fields:
                continue
            annotation = _yaml_type(_type_of(component, name))
            metadata = dict(field.metadata)
            default = defaults.get(name, field.default)
            if default is dataclasses.MISSING:
                keys[name] = annotation, Field(**metadata)
            else:
                keys[name] = (
                    annotation,
                    Field(list(default) if isinstance(default, tuple) else default, **metadata),
                )
        return with_keys(section, keys)

    return complete


def with_keys(section: type[AnySection], keys: Mapping[str, TypedField]) -> type[AnySection]:
    """Returns the section with further keys: name -> (type, pydantic field)."""
    fields: dict[str, Any] = {**keys}
    return create_model(
        section.__name__,
        __base__=section,
        __module__=section.__module__,
        __doc__=section.__doc__,
        **fields,
    )


def _type_of(component: type, name: str) -> Any:
    """Resolves the annotation of one field, of the class that declares it."""
    home = next(
        base for base in component.__mro__ if name in base.__dict__.get("__annotations__", {})
    )
    alone = type(
        "Alone",
        (),
        {"__annotations__": {name: home.__annotations__[name]}, "__module__": home.__module__},
    )
    return typing.get_type_hints(alone)[name]


def _yaml_type(annotation: object) -> Any:
    """Returns the type that YAML has for an annotation: a list for a tuple or sequence, a dict for
    a mapping."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_yaml_type(one) for one in arguments)]  # noqa: UP007
    if origin in (tuple, collections.abc.Sequence):
        return list[_yaml_type(arguments[0])]
    if origin is collections.abc.Mapping:
        return dict[arguments[0], _yaml_type(arguments[1])]
    return annotation
