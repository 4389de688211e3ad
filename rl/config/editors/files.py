"""Names and reads the shipped JSON Schemas. Imports neither pydantic nor the models that they are
made from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rl.config.packaged import PACKAGED

DIALECT = "http://json-schema.org/draft-07/schema#"
RUN = "duet.schema.json"
PARTIAL = "duet.partial.schema.json"
PRESET = "duet.preset.schema.json"
MODEL = "duet.model.schema.json"
REWARD = "reward"
"""Definition whose first branch lists the rewards that have a name."""


def read(name: str) -> dict[str, Any]:
    """Returns a shipped schema."""
    return json.loads((PACKAGED / name).read_text(encoding="utf-8"))


def text_of(schema: dict[str, Any]) -> str:
    """Returns the text of a schema's file, in ASCII."""
    return json.dumps(schema, indent=1) + "\n"


def with_rewards(schema: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Adds names of rewards, which installed packages bring, to those that a schema accepts."""
    if (definition := schema.get("definitions", {}).get(REWARD)) is not None:
        accepted = definition["anyOf"][0]["enum"]
        accepted += sorted(set(names) - set(accepted))
    return schema
