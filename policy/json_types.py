"""Types of decoded JSON and YAML: what `json.loads` returns, as code that only reads it sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

JsonValue: TypeAlias = Union[
    None, bool, int, float, str, "Sequence[JsonValue]", "Mapping[str, JsonValue]"
]
"""A decoded value. Lists and mappings are read-only, so that a `list[str]` is one too."""
JsonObject: TypeAlias = Mapping[str, JsonValue]
"""A decoded object: a record, a line of a file of rows, a section of a configuration."""
DecodedKeys: TypeAlias = Mapping[str, Any]
"""The keys of a configuration file of transformers, whose readers know the type of each value."""


def as_object(value: object) -> JsonObject:
    """Returns a decoded object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[JsonObject]:
    """Returns the objects of a decoded list; none for any other value."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
