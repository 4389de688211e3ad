"""Translates models of the configuration into JSON Schema.

The dialect is draft-07, which every version of yaml-language-server reads. Defaults and
descriptions are part of each property, and a description ends with the default, because editors
show descriptions only.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl.config.schema import Strict, accepted_types

Json = dict[str, Any]
ValueOf = Callable[["SchemaWriter", bool], Json]
"""(writer, partial) -> the schema of a value that an annotation cannot describe."""

INDEX = r"^[0-9]+$"
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "min_length": "minItems",
    "max_length": "maxItems",
}


class SchemaWriter:
    """Writes schemas of models, and collects the definitions that they refer to.

    A partial schema describes a file that is merged over others: it requires no key, and a mapping
    may change the entries of a list by index.
    """

    def __init__(
        self,
        values: Mapping[tuple[type, str], ValueOf],
        more_keys: Mapping[type, Json],
        given_elsewhere: Iterable[type],
    ):
        """Args:
        values: (model, key) -> writer of the key's value, in place of its annotation.
        more_keys: model -> properties of keys that loading accepts and the model does not have.
        given_elsewhere: models whose required keys another key of the file may set.
        """
        self.definitions: dict[str, Json] = {}
        self._values = values
        self._more_keys = more_keys
        self._given_elsewhere = tuple(given_elsewhere)

    def reference(self, name: str, write: Callable[[], Json]) -> Json:
        """Returns a reference to a definition, which `write` makes if there is none of this
        name."""
        if name not in self.definitions:
            self.definitions[name] = {}  # keeps the order of first use
            self.definitions[name] = write()
        return {"$ref": f"#/definitions/{name}"}

    def section(self, model: type[BaseModel], partial: bool) -> Json:
        """Returns a reference to the schema of a model, its short form not included."""
        name = f"{model.__name__}-partial" if partial and self._differs(model) else model.__name__
        return self.reference(name, lambda: self.object(model, partial))

    def object(self, model: type[BaseModel], partial: bool) -> Json:
        """Returns the schema of a model as a mapping of its keys."""
        fields = model.model_fields
        properties = {
            name: self._field(model, name, partial) for name in fields
        } | self._more_keys.get(model, {})
        schema: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        if not partial:
            required = [name for name, field in fields.items() if field.is_required()]
            if required and model not in self._given_elsewhere:
                schema["required"] = required
            if names := exactly_one(model):
                schema["oneOf"] = [
                    {"required": [name], "properties": {name: {"not": _NULL}}} for name in names
                ]
        return schema

    def options(self, fields: Mapping[str, FieldInfo], partial: bool = False) -> Json:
        """Returns name -> schema of fields outside a section, such as the options of an
        algorithm."""
        return {
            name: self._described(self.value(field, partial), field)
            for name, field in fields.items()
        }

    def _field(self, model: type[BaseModel], name: str, partial: bool) -> Json:
        field = model.model_fields[name]
        kinds = accepted_types(model.model_fields[name].annotation)
        if write := self._values.get((model, name)):
            schema = write(self, partial)
        else:
            schema = self.value(field, partial)
        # A section or list left empty is its default.
        empty = not field.is_required() and not kinds <= _SCALARS.keys() and type(None) not in kinds
        if empty or (write and type(None) in kinds):
            schema = nullable(schema)
        return self._described(schema, field, [] if write else _about(field.annotation))

    def value(self, field: FieldInfo, partial: bool) -> Json:
        """Returns the schema of a field's annotation and bounds."""
        schema = self.annotation(field.annotation, partial)
        for one in field.metadata:
            for attribute, keyword in _BOUNDS.items():
                if (bound := getattr(one, attribute, None)) is not None:
                    target = schema["anyOf"][0] if "anyOf" in schema else schema
                    target[keyword] = bound
        return schema

    def annotation(self, annotation: Any, partial: bool) -> Json:
        """Returns the schema of a type. Raises TypeError for a type that no configuration has."""
        origin = typing.get_origin(annotation)
        arguments = typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            members = [self.annotation(one, partial) for one in arguments if one is not type(None)]
            schema = members[0] if len(members) == 1 else {"anyOf": members}
            return nullable(schema) if type(None) in arguments else schema
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is list:
            return self.list_of(self.annotation(arguments[0], partial), partial)
        if origin is dict:
            value = {} if arguments[1] is Any else self.annotation(arguments[1], partial)
            return (
                {"type": "object", "additionalProperties": value} if value else {"type": "object"}
            )
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.with_short_form(annotation, self.section(annotation, partial), partial)
        if annotation in _SCALARS:
            return {"type": _SCALARS[annotation]}
        raise TypeError(
            f"no JSON Schema for the annotation {annotation}; teach SchemaWriter.annotation"
        )

    def with_short_form(self, model: type[BaseModel], schema: Json, partial: bool) -> Json:
        """Returns the schema of a section, or of the text that sets its one key."""
        short = getattr(model, "shorthand", None)
        if short is None:
            return schema
        write = self._values.get((model, short))
        text = {"type": "string"} if write is None else write(self, partial)
        return {"anyOf": [*text["anyOf"], schema] if "anyOf" in text else [text, schema]}

    def list_of(self, entry: Json, partial: bool) -> Json:
        """Returns the schema of a list. A partial one may be a mapping that changes entries by
        index."""
        schema: Json = {"type": "array", "items": entry}
        if not partial:
            return schema
        by_index = {
            "type": "object",
            "patternProperties": {INDEX: entry},
            "additionalProperties": False,
        }
        return {
            "anyOf": [
                schema,
                by_index | {"description": "changes entries of the list by index, from 0"},
            ]
        }

    def _described(self, schema: Json, field: FieldInfo, about: Iterable[str] = ()) -> Json:
        if "$ref" in schema:  # draft-07 ignores what stands next to a reference
            schema = {"allOf": [schema]}
        default = field.get_default()
        text = ". ".join(text.rstrip(".") for text in (field.description, *about) if text)
        if default is PydanticUndefined or isinstance(default, BaseModel):
            return {"description": f"{text}."} | schema
        shown = default if isinstance(default, str) else json.dumps(default)
        said = "" if "default:" in text.lower() else f" Default: {shown}."
        return {"description": f"{text}.{said}", "default": default} | schema

    def _differs(self, model: type[BaseModel]) -> bool:
        """Whether the partial schema of a model is another one."""
        if exactly_one(model) or any(field.is_required() for field in model.model_fields.values()):
            return True
        return any(self._changes(field.annotation) for field in model.model_fields.values())

    def _changes(self, annotation: Any) -> bool:
        if typing.get_origin(annotation) is list:
            return True
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self._differs(annotation)
        return any(self._changes(one) for one in typing.get_args(annotation))


def _about(annotation: Any) -> list[str]:
    """Returns the documentation of the sections in an annotation, which an editor shows with the
    key's description."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        text = inspect.cleandoc(annotation.__doc__ or "")
        return (
            [] if text in ("", inspect.cleandoc(Strict.__doc__ or "")) else [" ".join(text.split())]
        )
    return [text for one in typing.get_args(annotation) for text in _about(one)]


_NULL: Json = {"type": "null"}


def nullable(schema: Json) -> Json:
    """Returns the schema that accepts null too."""
    if schema.keys() == {"enum"}:
        return {"enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    if schema.keys() == {"anyOf"}:
        return {"anyOf": [*schema["anyOf"], _NULL]}
    return {"anyOf": [schema, _NULL]}


def exactly_one(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the keys of a model of which exactly one must be set, or ()."""
    return getattr(model, "exactly_one", ())
