"""Constraints under which a reply is a call of a tool, for each format of formats.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.calls import formats
from rollout.calls.formats import ResponseTemplate
from rollout.calls.replies import Tool, types_of
from rollout.constraints import with_few_spaces
from rollout.text.interface import Tokenizer
from rollout.types import Constraint

_INTEGER = "/-?(0|[1-9][0-9]{0,15})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][-+]?[0-9]{1,3})?/"
_QUOTE = '<|"|>'  # of Gemma


def call_constraint(
    template: ResponseTemplate, tools: Sequence[Tool], tokenizer: Tokenizer
) -> Constraint | None:
    """Returns the constraint under which a reply is one call of one of these tools; None: not known
    for this format.

    Where arguments are JSON, they follow their schema. In formats of tags and in Gemma's the names,
    the types, the required ones and the values of an `enum` are those of the schema, and texts are
    free.
    """
    write = next((write for known, write in _FORMATS if template is known), None)
    if write is None:
        return None
    grammar = _Grammar(_special_tokens(tokenizer))
    calls = [write(grammar, tool["function"]) for tool in tools]
    grammar.rules["start"] = f": {' | '.join(calls)}"
    return Constraint("lark", grammar.text)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the tokens that no text of a grammar spells, by name: for llguidance those that are
    special, and added ones in angle brackets."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    names = {number: str(token.content) for number, token in added.items()}
    return {
        name: number
        for number, name in names.items()
        if added[number].special or (name.startswith("<") and name.endswith(">"))
    }


@dataclass
class _Grammar:
    """A grammar of llguidance while it is written. special: tokens by name. rules: what follows
    the name of each, with its options."""

    special: Mapping[str, int]
    rules: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Returns the grammar."""
        return "".join(f"{name}{rule}\n" for name, rule in self.rules.items())

    def mark(self, text: str) -> str:
        """Returns what matches a text, with its special tokens."""
        names = sorted((name for name in self.special if name in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part)
            for part in parts
            if part
        )

    def text_before(self, end: str) -> str:
        """Returns what matches any text, and the mark that ends it."""
        if any(name in end for name in self.special):  # which no text can hold
            return f"{self.rule('/(?s:.*)/')} {self.mark(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={json.dumps(end)}]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns what matches a value of JSON."""
        return self.rule(f"%json {json.dumps(with_few_spaces(schema))}")

    def rule(self, right: str, options: str = "") -> str:
        """Adds a rule, unless there is one like it; returns its name."""
        rule = f"{options}: {right}"
        name = next((name for name, known in self.rules.items() if known == rule), None)
        if name is None:
            name = f"rule{len(self.rules)}"
            self.rules[name] = rule
        return name


def _parameters(function: Tool) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object"}


@dataclass(frozen=True)
class _Argument:
    """An argument of a function. schema: with the definitions that it may refer to. types: those
    that the schema allows; none: any."""

    name: str
    schema: Mapping[str, Any]
    types: Sequence[str]
    required: bool

    @property
    def choices(self) -> list[Any]:
        """Returns the values of its `enum` or `const`; none: there are others."""
        if "const" in self.schema:
            return [self.schema["const"]]
        values = self.schema.get("enum")
        return values if isinstance(values, list) else []

    @property
    def is_text(self) -> bool:
        """Whether it may be any text."""
        others = ("$ref", "anyOf", "oneOf", "allOf")
        is_any = not self.types and not any(key in self.schema for key in others)
        return is_any or "string" in self.types


def _arguments(function: Tool) -> list[_Argument]:
    parameters = _parameters(function)
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    definitions = next((each for each in shared.values() if isinstance(each, dict)), {})
    properties = parameters.get("properties")
    required = parameters.get("required")
    return [
        _Argument(
            name,
            shared | (schema if isinstance(schema, dict) else {}),
            types_of(schema, definitions),
            isinstance(required, list) and name in required,
        )
        for name, schema in (properties if isinstance(properties, dict) else {}).items()
    ]


def _object(grammar: _Grammar, function: Tool, arguments: str) -> str:
    """Returns what matches an object with the name and the arguments."""
    return grammar.json(
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: _parameters(function),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
    )


def _hermes(grammar: _Grammar, function: Tool) -> str:
    call = _object(grammar, function, "arguments")
    opens, closes = map(grammar.mark, ("<tool_call>\n", "\n</tool_call>"))
    return f"{opens} {call} {closes}"


def _llama(grammar: _Grammar, function: Tool) -> str:
    return _object(grammar, function, "parameters")


def _mistral(grammar: _Grammar, function: Tool) -> str:
    call = _object(grammar, function, "arguments")
    return f"{grammar.mark('[TOOL_CALLS] [')} {call} {grammar.mark(']')}"


def _deepseek(grammar: _Grammar, function: Tool) -> str:
    opens = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    begin = grammar.mark(f"{opens}{function['name']}\n```json\n")
    end = grammar.mark("\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    return f"{begin} {grammar.json(_parameters(function))} {end}"


def _gpt_oss(grammar: _Grammar, function: Tool) -> str:
    """The recipient stands behind the channel, as the model has it, or in front of it, as the
    template has it. The token that ends the completion closes the call."""
    recipient = f" to=functions.{function['name']}"
    opens = (
        f"<|channel|>commentary{recipient} <|constrain|>json<|message|>",
        f"{recipient}<|channel|>commentary json<|message|>",
    )
    return f"({' | '.join(map(grammar.mark, opens))}) {grammar.json(_parameters(function))}"


def _functions(grammar: _Grammar, function: Tool) -> str:
    parts = [grammar.mark(f"<tool_call>\n<function={function['name']}>\n")]
    for argument in _arguments(function):
        opens = f"<parameter={argument.name}>\n"
        parts.append(_tagged(grammar, argument, opens, "\n</parameter>\n"))
    return " ".join([*parts, grammar.mark("</function>\n</tool_call>")])


def _glm(grammar: _Grammar, function: Tool) -> str:
    parts = [grammar.mark(f"<tool_call>{function['name']}\n")]
    for argument in _arguments(function):
        opens = f"<arg_key>{argument.name}</arg_key>\n<arg_value>"
        parts.append(_tagged(grammar, argument, opens, "</arg_value>\n"))
    return " ".join([*parts, grammar.mark("</tool_call>")])


def _tagged(grammar: _Grammar, argument: _Argument, opens: str, closes: str) -> str:
    """Returns what matches an argument between its tags. A text stands there without quotes."""
    if argument.choices:
        shown = [each if isinstance(each, str) else json.dumps(each) for each in argument.choices]
        value = f"({' | '.join(map(grammar.mark, shown))}) {grammar.mark(closes)}"
    elif argument.is_text:
        value = grammar.text_before(closes)
    elif argument.types == ["boolean"]:  # some templates write it as Python does
        value = f'("true" | "false" | "True" | "False") {grammar.mark(closes)}'
    else:
        value = f"{grammar.json(argument.schema)} {grammar.mark(closes)}"
    tagged = f"{grammar.mark(opens)} {value}"
    return tagged if argument.required else f"({tagged})?"


def _gemma(grammar: _Grammar, function: Tool) -> str:
    opens = grammar.mark(f"<|tool_call>call:{function['name']}{{")
    parts = (opens, _gemma_arguments(grammar, function), grammar.mark("}<tool_call|>"))
    return " ".join(filter(None, parts))


def _gemma_arguments(grammar: _Grammar, function: Tool) -> str:
    """Returns what matches the arguments, the required ones first, with commas between them."""
    arguments = sorted(_arguments(function), key=lambda each: not each.required)
    written = [
        f"{grammar.mark(each.name + ':')} {_gemma_value(grammar, each)}" for each in arguments
    ]
    count = sum(each.required for each in arguments)
    comma = grammar.mark(",")
    optional = [f"({comma} {each})?" for each in written[count:]]
    if count:
        return " ".join([f" {comma} ".join(written[:count]), *optional])
    firsts = [" ".join([each, *optional[n + 1 :]]) for n, each in enumerate(written)]
    return f"({' | '.join(firsts)})?" if firsts else ""


def _gemma_value(grammar: _Grammar, argument: _Argument) -> str:
    quote = grammar.mark(_QUOTE)
    if argument.choices:
        shown = [
            f"{quote} {grammar.mark(each)} {quote}"
            if isinstance(each, str)
            else grammar.mark(json.dumps(each))
            for each in argument.choices
        ]
        return f"({' | '.join(shown)})"
    simple = {
        "string": f"{quote} {grammar.text_before(_QUOTE)}",
        "integer": _INTEGER,
        "number": _NUMBER,
        "boolean": '("true" | "false")',
        "null": '"null"',
        "array": "gemma_list",
        "object": "gemma_object",
    }
    grammar.rules |= {
        "gemma_list": ': "[" (gemma_value ("," gemma_value)*)? "]"',
        "gemma_object": ': "{" (gemma_pair ("," gemma_pair)*)? "}"',
        "gemma_pair": ': /[A-Za-z_][A-Za-z0-9_]{0,63}/ ":" gemma_value',
        "gemma_value": f": {' | '.join(simple.values())}",
    }
    types = argument.types or ["gemma_value"]
    return f"({' | '.join(simple.get(each, each) for each in types)})"


_FORMATS: Sequence[tuple[ResponseTemplate, Callable[[_Grammar, Tool], str]]] = (
    (formats.HERMES, _hermes),
    (formats.FUNCTIONS, _functions),
    (formats.GLM, _glm),
    (formats.LLAMA, _llama),
    (formats.MISTRAL, _mistral),
    (formats.DEEPSEEK, _deepseek),
    (formats.GEMMA, _gemma),
    (formats.GPT_OSS, _gpt_oss),
)
