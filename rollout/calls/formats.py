"""How families write calls of tools, as response templates of transformers.

A response template names the marks that open and close the fields of a reply (`content`,
`reasoning_content`, `tool_calls`), and how the text of a field becomes a value. A tokenizer that
has one of its own (`response_template`) is read by it; of others the chat template tells the
format, for it holds the marks that it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from rollout.text.interface import Tokenizer

ResponseTemplate = Mapping[str, Any]

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_CONTENT = {"content": "text"}


def _template(calls: dict[str, Any], **others: dict[str, Any]) -> dict[str, Any]:
    """Returns a response template. It reads a reply from the generation prompt on, so its anchor is
    the beginning of the text."""
    fields = {"tool_calls": {"repeats": True, **calls}, "content": _CONTENT, **others}
    defaults = {"role": "assistant"}
    return {"defaults": defaults, "start_anchor_pattern": r"\A", "fields": fields}


HERMES = _template(
    {
        "open_pattern": r"\s*<tool_call>\s*",
        "close_pattern": r"\s*</tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    reasoning_content=_THINK,
)
"""Qwen2.5, Qwen3, Hermes: an object with `name` and `arguments`."""
FUNCTIONS = _template(
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": _CALL,
    },
    reasoning_content=_THINK,
)
"""Qwen3.5, Qwen3-Coder, Nemotron 3: a tag for each parameter."""
GLM = _template(
    {
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)\s*",
        "close_pattern": r"\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _CALL,
    },
    reasoning_content=_THINK,
)
"""GLM-4.5: pairs of tags, a key and a value."""
LLAMA = _template(
    {
        "open_pattern": r'(?:<\|python_tag\|>)?\s*(?=\{\s*"name"\s*:)',
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    }
)
"""Llama 3.1, 3.2: one object with `name` and `parameters`, which ends the turn."""
MISTRAL = _template(
    {
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*",
        "content": "json",
        "transform_each": True,
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
    }
)
"""Mistral v3 to v7: a list of objects, which ends the turn."""
DEEPSEEK = _template(
    {
        "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function"
        r"<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        "close_pattern": r"\n```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        "content": "json",
        "transform": _CALL,
    },
    reasoning_content=_THINK,
)
"""DeepSeek-V3: a fenced object after the name."""
GEMMA = _template(
    {
        "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.-]+)",
        "close_pattern": r"<tool_call\|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _CALL,
    },
    reasoning_content={
        "open": "<|channel>thought\n",
        "close_pattern": r"<channel\|>\s*",
        "content": "text",
    },
)
"""Gemma 4: an object without quotes around its keys."""
GPT_OSS = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\A",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>commentary\s*)?"
            r"to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>commentary)?"
            r"\s*(?:<\|constrain\|>)?\s*(?:json)?<\|message\|>",
            "close_pattern": r"<\|call\|>",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>",
            "close_pattern": r"<\|return\|>|<\|end\|>",
            "content": "text",
        },
    },
}
"""gpt-oss: channels; the call names its recipient in front of the channel or behind it."""

_MARKS = {
    "<｜tool▁call▁begin｜>": DEEPSEEK,
    "<|tool_call>": GEMMA,
    "<|channel|>analysis": GPT_OSS,
    "<arg_key>": GLM,
    "<function=": FUNCTIONS,
    "[TOOL_CALLS]": MISTRAL,
    "<tool_call>": HERMES,
    '"parameters": ': LLAMA,
}
"""What a chat template holds -> how it writes calls. The first that it holds decides."""


def response_template(tokenizer: Tokenizer) -> ResponseTemplate | None:
    """Returns how the model writes its replies; None: unknown."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        templates = templates.get("tool_use", templates.get("default"))
    if not templates or "tool_calls" not in templates:
        return None
    return next((each for mark, each in _MARKS.items() if mark in templates), None)


def without_calls(template: ResponseTemplate) -> ResponseTemplate | None:
    """Returns how a reply is read that has no tools to call; None: its text stays as it is.

    The channels of gpt-oss and Gemma 4 stand between special tokens. In a text without these tokens
    reasoning and content would be one.
    """
    if template is not GPT_OSS and template is not GEMMA:
        return None
    fields = {name: each for name, each in template["fields"].items() if name != "tool_calls"}
    return {**template, "fields": fields}


def splitter(template: ResponseTemplate) -> dict[str, Any]:
    """Returns a response template under which a call is its text, with what the groups of its marks
    captured. It parses no call, so a call that is no JSON does not make the parser raise."""
    split = deepcopy(dict(template))
    if "tool_calls" in split["fields"]:
        calls = split["fields"]["tool_calls"]
        kept = ("open", "open_pattern", "close", "close_pattern")
        marks = {name: calls[name] for name in kept if name in calls}
        split["fields"]["tool_calls"] = {**marks, "repeats": True, "content": "text"}
        if names := _groups(marks):
            transform = {"body": "{content}", "captures": {name: f"{{{name}}}" for name in names}}
            split["fields"]["tool_calls"]["transform"] = transform
    return split


def _groups(marks: Mapping[str, Any]) -> list[str]:
    """Returns the names of the groups of the patterns."""
    import regex

    patterns = [marks[name] for name in ("open_pattern", "close_pattern") if name in marks]
    return [name for pattern in patterns for name in regex.compile(pattern).groupindex]
