"""Makes JSON Schemas of a configuration's models with pydantic's generator.

The dialect is draft-07, which every version of yaml-language-server reads. Editors show
descriptions only, so a description ends with the default, and a key of a section also has what the
section says of itself.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from rl.config.schema import Strict, TypedField, accepted_types

_SCALARS = {int, float, str, bool}


class ConfigSchema(GenerateJsonSchema):
    """The JSON Schemas of sections that stand in a file with all their required keys."""

    def __init__(
        self,
        types: Mapping[tuple[type, str], object],
        more_keys: Mapping[type, Mapping[str, JsonSchemaValue]],
        choices: Mapping[type, tuple[str, Mapping[str, type[BaseModel]]]],
        given_elsewhere: Iterable[type],
    ):
        """Args:
        types: (model, key) -> type of the key, in place of its annotation, which says less.
        more_keys: model -> properties of keys that loading accepts and the model does not have.
        choices: model -> (key, name -> model of the key `options` where the first key has this
        name).
        given_elsewhere: models whose required keys another key of the file may set.
        """
        super().__init__()
        self._types = types
        self._more_keys = more_keys
        self._choices = choices
        self._given_elsewhere = tuple(given_elsewhere)

    def definitions_of(self, *models: type[BaseModel]) -> dict[str, JsonSchemaValue]:
        """Returns name -> schema of the models and of all that they refer to. Call it once."""
        inputs: Any = [(model, "validation", model.__pydantic_core_schema__) for model in models]
        _, definitions = self.generate_definitions(inputs)
        return {str(name): schema for name, schema in definitions.items()}

    def field_title_should_be_set(self, schema: object) -> bool:
        """No: editors would show it above the description, and it repeats the key."""
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Returns the schema of a section: its keys, or the text that sets its one key."""
        model: type[BaseModel] = schema["cls"]
        result = super().model_schema(schema)
        result.pop("title")
        result.pop("description", None)
        properties = result["properties"]
        for name in properties:
            properties[name] = self._property(model, name, properties[name])
        if not issubclass(model, Strict):
            return result
        result["properties"] = properties | self._more_keys.get(model, {})
        self.set_demands(model, result)
        if model in self._choices:
            key, options = self._choices[model]
            result["allOf"] = [self._if_named(key, *item) for item in options.items()]
        if model.shorthand is None:
            return result
        text = self.of_type(self._types.get((model, model.shorthand), str))
        return self.get_union_of_schemas([text, result])

    def set_demands(self, model: type[Strict], schema: JsonSchemaValue) -> None:
        """Sets which keys a section must have."""
        if model in self._given_elsewhere:
            schema.pop("required", None)
        elif model.exactly_one:
            schema["oneOf"] = one_of(model.exactly_one)

    def of_type(self, annotation: object) -> JsonSchemaValue:
        """Returns the schema of any type that pydantic knows."""
        return self.generate_inner(TypeAdapter(cast(type, annotation)).core_schema)

    def _property(
        self, model: type[BaseModel], name: str, schema: JsonSchemaValue
    ) -> JsonSchemaValue:
        field = model.model_fields[name]
        kinds = accepted_types(field.annotation)
        if (model, name) in self._types:
            default = {"default": schema["default"]} if "default" in schema else {}
            schema = self.of_type(self._types[model, name]) | default
        if isinstance(field.default, BaseModel):
            schema.pop("default")
        # A section or list left empty is its default.
        if issubclass(model, Strict) and not field.is_required() and not kinds <= _SCALARS:
            schema = _nullable(schema)
        about = [] if (model, name) in self._types else _about(field.annotation)
        text = ". ".join(part.rstrip(".") for part in (field.description, *about) if part)
        if text and "default" in schema and "default:" not in text.lower():
            default = schema["default"]
            shown = default if isinstance(default, str) else json.dumps(default)
            text = f"{text}. Default: {shown}"
        if text and "$ref" in schema:  # draft-07 ignores what stands next to a reference
            schema["allOf"] = [{"$ref": schema.pop("$ref")}]
        return schema | {"description": f"{text}."} if text else schema

    def _if_named(self, key: str, name: str, options: type[BaseModel]) -> JsonSchemaValue:
        return {
            "if": {"required": [key], "properties": {key: {"const": name}}},
            "then": {"properties": {"options": self.of_type(options | None)}},
        }


class PartSchema(ConfigSchema):
    """Schemas of sections in a file that is merged over others: no key is required, and a mapping
    may change the entries of a list by index."""

    def set_demands(self, model: type[Strict], schema: JsonSchemaValue) -> None:
        """Lets a section stand without its required keys: another file may hold them."""
        schema.pop("required", None)

    def list_schema(self, schema: core_schema.ListSchema) -> JsonSchemaValue:
        """Returns the schema of a list, or of a mapping of its indices."""
        complete = super().list_schema(schema)
        by_index = {
            "type": "object",
            "patternProperties": {r"^[0-9]+$": complete["items"]},
            "additionalProperties": False,
            "description": "changes entries of the list by index, from 0",
        }
        return {"anyOf": [complete, by_index]}


def one_of(keys: tuple[str, ...]) -> list[JsonSchemaValue]:
    """Returns schemas of which exactly one holds if exactly one of the keys is set."""
    return [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]


def _nullable(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema that accepts null too."""
    own = {key: value for key, value in schema.items() if key not in ("default", "description")}
    rest = {key: value for key, value in schema.items() if key not in own}
    branches = own["anyOf"] if own.keys() == {"anyOf"} else [own]
    null = {"type": "null"}
    return rest | {"anyOf": branches if null in branches else [*branches, null]}


def _about(annotation: object) -> Iterator[str]:
    """Yields what the sections in an annotation say of themselves."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.__doc__:
            yield " ".join(inspect.cleandoc(annotation.__doc__).split())
        return
    for one in typing.get_args(annotation):
        yield from _about(one)


_OPTIONS = ConfigDict(extra="forbid", protected_namespaces=())


def options_model(name: str, fields: Mapping[str, TypedField]) -> type[BaseModel]:
    """Returns a model of options that are declared outside a section. fields: key -> (type,
    pydantic field)."""
    keys: dict[str, Any] = {**fields}
    return create_model(name, __config__=_OPTIONS, **keys)


def named(name: str, annotation: object) -> Any:
    """Returns a type whose schema is a definition with this name."""
    alias: Any = TypeAliasType
    return alias(name, annotation)
