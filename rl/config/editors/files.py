"""Names and reads the shipped JSON Schemas. Imports neither pydantic nor the models that they are
made from.

The schemas refer to one file of definitions, by a path relative to their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rl.config.packaged import PACKAGED

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

DIALECT = "http://json-schema.org/draft-07/schema#"
RUN = "duet.schema.json"
PARTIAL = "duet.partial.schema.json"
PRESET = "duet.preset.schema.json"
MODEL = "duet.model.schema.json"
DEFINITIONS = "duet.definitions.schema.json"
REWARD = "reward"
"""Definition whose first branch lists the rewards that have a name."""
COMMENT = "generated: python -m rl.config.editors.documents"
"""The `$comment` of each file."""


_REFERENCE = re.compile(r'#/\$defs/([^"]+)"')


def read(name: str) -> JsonSchemaValue:
    """Returns a shipped schema as one document, with those definitions that it needs."""
    text = (PACKAGED / name).read_text(encoding="utf-8").replace(f'"{DEFINITIONS}#', '"#')
    every = json.loads((PACKAGED / DEFINITIONS).read_text(encoding="utf-8"))["$defs"]
    return json.loads(text) | {"$defs": needed(text, every)}


def needed(text: str, definitions: Mapping[str, JsonSchemaValue]) -> dict[str, JsonSchemaValue]:
    """Returns the definitions that a text refers to, directly or not, in their order."""
    names: set[str] = set()
    waiting = _REFERENCE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += _REFERENCE.findall(json.dumps(definitions[name]))
    return {name: schema for name, schema in definitions.items() if name in names}


def text_of(schema: JsonSchemaValue) -> str:
    """Returns the text of a schema's file, in ASCII."""
    return json.dumps(schema, indent=1) + "\n"


def with_rewards(schema: JsonSchemaValue, names: Iterable[str]) -> JsonSchemaValue:
    """Adds names of rewards, which installed packages bring, to those that a schema accepts."""
    if (definition := schema.get("$defs", {}).get(REWARD)) is not None:
        accepted = definition["anyOf"][0]["enum"]
        accepted += sorted(set(names) - set(accepted))
    return schema
