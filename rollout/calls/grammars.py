"""Constraints under which a reply is a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollout.calls import formats
from rollout.calls.formats import ResponseTemplate
from rollout.calls.replies import Tool
from rollout.constraints import with_few_spaces
from rollout.types import Constraint


def call_constraint(template: ResponseTemplate, tools: Sequence[Tool]) -> Constraint | None:
    """Returns the constraint under which a reply is one call of one of these tools, with arguments
    of its schema; None: not known for this format."""
    if template is formats.HERMES:
        opens, closes, arguments = "<tool_call>\n", "\n</tool_call>", "arguments"
    elif template is formats.LLAMA:
        opens, closes, arguments = "", "", "parameters"
    else:
        return None
    schemas = [_schema(tool["function"], arguments) for tool in tools]
    schema = with_few_spaces(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    marks = [json.dumps(mark) for mark in (opens, closes)]
    rule = " ".join([marks[0] if opens else "", "call", marks[1] if closes else ""]).strip()
    return Constraint("lark", f"start: {rule}\ncall: %json {json.dumps(schema)}\n")


def _schema(function: Tool, arguments: str) -> dict[str, object]:
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
