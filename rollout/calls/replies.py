"""Reads a reply of a model: its content, its reasoning, and its calls of tools, each with what is
wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from rollout.calls.formats import ResponseTemplate, splitter

CallStatus = Literal["ok", "not_json", "unclosed", "no_name", "unknown_tool", "bad_arguments"]
Tool = Mapping[str, Any]
"""A tool as chat templates read it: `{"type": "function", "function": {"name", "parameters"}}`."""


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    status: "ok", or what is wrong; problem says it in words. arguments: by name, with texts cast to
    the types of the tool's schema. text: what the model wrote between the marks of the call.
    """

    status: CallStatus
    text: str
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class ReplyText:
    """A piece of a reply that is no call. reasoning: it is thought, not said."""

    text: str
    reasoning: bool


class ReplyReader:
    """Reads a reply piece by piece.

    Content on both sides of a call is one text. One call that cannot be read leaves the others as
    they are.
    """

    def __init__(self, template: ResponseTemplate, prefix: str, tools: Sequence[Tool]):
        """prefix: what the prompt has already written of the reply, such as `<think>`. tools: those
        that may be called."""
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._fields = load_response_template(dict(template)).fields
        self._parser = ResponseParser(splitter(template), prefix=prefix)
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._speaks = False  # some of the content has been yielded
        self._space = ""  # behind it, which is a part of it if more follows

    def feed(self, text: str) -> Iterator[ReplyText | Call]:
        """Yields what the next piece of the reply completes."""
        yield from self._read(self._parser.feed(text), closed=True)

    def finish(self, *, stopped: bool) -> Iterator[ReplyText | Call]:
        """Yields the rest. stopped: the model ended its turn; otherwise it was cut off, perhaps
        inside of a call."""
        _, events = self._parser.finalize()
        yield from self._read(events, closed=stopped)

    def _read(self, events: Sequence[Mapping[str, Any]], *, closed: bool):
        for event in events:
            kind, name = event["type"], event["field"]
            if name == "tool_calls":
                if kind == "region_close":
                    yield from self._calls(event["value"], closed=closed)
            elif kind == "region_chunk":
                yield from self._text(event["text"], reasoning=name != "content")

    def _text(self, text: str, *, reasoning: bool) -> Iterator[ReplyText]:
        """Yields a text without the white space in front of the content and behind it."""
        if reasoning:
            yield ReplyText(text, True)
            return
        spaced = self._space + text
        end = len(spaced.rstrip())
        self._space = spaced[end:] if end or self._speaks else ""
        said = spaced[:end] if self._speaks else spaced[:end].lstrip()
        if said:
            self._speaks = True
            yield ReplyText(said, False)

    def _calls(self, value: Any, *, closed: bool) -> Iterator[Call]:
        """Reads the text between the marks of a call, or of a list of calls."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        body = value if isinstance(value, str) else value["body"]
        captures = {} if isinstance(value, str) else value["captures"]
        tags = self._fields["tool_calls"].content_args.get("tag_pattern")
        if tags is not None and (not closed or re.sub(tags, "", body, flags=re.S).strip()):
            yield Call("unclosed", body, problem="a parameter or the call is not closed")
            return
        try:
            parsed = process_field(body, self._fields["tool_calls"], captures)
            json.dumps(parsed, allow_nan=False)
        except (ValueError, KeyError, RecursionError):
            status: CallStatus = "not_json" if closed else "unclosed"
            yield Call(status, body, problem="the call is no valid JSON of its format")
            return
        for each in parsed if isinstance(parsed, list) else [parsed]:
            yield self._checked(each, body)

    def _checked(self, parsed: Any, body: str) -> Call:
        function = parsed.get("function") if isinstance(parsed, dict) else None
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            return Call("no_name", body, problem="the call names no tool")
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # some models write JSON inside of JSON
            arguments = _object_in(arguments)
        if arguments is None and name in self._tools:
            arguments = {}
        if name not in self._tools:
            names = ", ".join(self._tools)
            problem = f"there is no tool {name}; the tools are: {names}"
            given = arguments if isinstance(arguments, dict) else {}
            return Call("unknown_tool", body, name, given, problem)
        if not isinstance(arguments, dict):
            return Call("bad_arguments", body, name, problem="the arguments are no object")
        schema = self._tools[name].get("parameters") or {}
        cast, problem = checked_arguments(arguments, schema)
        return Call("bad_arguments" if problem else "ok", body, name, cast, problem)


def _object_in(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_DEEPEST = 16  # unions and references inside of each other that are read
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def checked_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns (arguments with texts cast to the types of a JSON schema, what is wrong with them or
    ""). Checked are the required names and the types of the arguments themselves, not of what they
    hold. What is no JSON schema restricts nothing."""
    definitions = schema.get("$defs", schema.get("definitions"))
    definitions = definitions if isinstance(definitions, dict) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    missing = [name for name in required if name not in arguments]
    if missing:
        return dict(arguments), f"the argument {missing[0]} is missing"
    cast = {}
    for name, value in arguments.items():
        types = types_of(properties.get(name), definitions)
        cast[name] = _cast(value, types)
        if types and not any(_is(cast[name], each) for each in types):
            return dict(arguments), f"the argument {name} must be of type {' or '.join(types)}"
    return cast, ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def types_of(schema: Any, definitions: Mapping[str, Any], deeper: int = _DEEPEST) -> list[str]:
    """Returns the types that a schema allows; none: any.

    definitions: schemas by the names that end a `$ref`. deeper: how many unions and references
    inside of each other are read.
    """
    if not isinstance(schema, dict) or deeper < 0:
        return []
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(definitions.get(reference.rpartition("/")[2]), definitions, deeper - 1)
    named = schema.get("type")
    types = [named] if isinstance(named, str) else list(_list(named))
    for union in ("anyOf", "oneOf"):
        schemas = [each for each in _list(schema.get(union)) if isinstance(each, dict)]
        branches = [types_of(each, definitions, deeper - 1) for each in schemas]
        if not all(branches):
            return []
        types += [each for branch in branches for each in branch]
    if types and schema.get("nullable"):
        types.append("null")
    return [each for each in types if isinstance(each, str) and each in _TYPES]


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _cast(value: Any, types: Sequence[str]) -> Any:
    """Returns a text that spells a value of one of the types, the first of them, as that value;
    everything else as it is."""
    if not isinstance(value, str) or "string" in types:
        return value
    for kind in types:
        try:
            read = json.loads(value.lower() if kind == "boolean" else value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if _is(read, kind):
            return read
    return value
