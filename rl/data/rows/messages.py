"""Messages of rows in one form, from the forms of OpenAI, Hugging Face, ShareGPT and Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.data.encoded import Messages
from rl.data.rows.files import Malformed, parse, problem_of

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""`from` of a message of ShareGPT -> role."""

_WEIGHTS = ("weight", "train", "loss_mask")
"""Keys that say whether a turn of the assistant is trained on: of OpenAI, axolotl and ms-swift."""


def read_messages(value: object, name: str) -> Messages:
    """Returns the messages in column `name` as mappings of `role`, `content` and further keys of
    the template.

    Keys that are null are left out, because Arrow gives all messages the same keys. The content of
    a call of tools may be null, and its arguments may be JSON texts (OpenAI); they become objects,
    which chat templates expect. A turn of the assistant with `weight: 0` (`train: false`,
    `loss_mask: 0`) keeps `weight: 0`. A text is read as JSON, for CSV files. Raises ValueError for
    anything else.
    """
    if isinstance(value, str):
        value = _from_text(value, name, "a list of messages")
    if isinstance(value, Mapping):  # one message, as LLaMA-Factory has the answers of a pair
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"`{name}` must be a text or a list of messages, got {_kind(value)}")
    try:
        return [_message(message, f"message {number}") for number, message in enumerate(value)]
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from None


def _from_text(text: str, name: str, what: str) -> Any:
    value = parse(text)
    if isinstance(value, Malformed):
        raise ValueError(f"`{name}` must be {what}, got a text that is no JSON: {text[:40]!r}")
    if (problem := problem_of(value)) is not None:
        raise ValueError(f"`{name}`: {problem}")
    return value


def _kind(value: object) -> str:
    return "an empty list" if value == [] else type(value).__name__


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be a mapping with `role` and `content`")
    given = {str(key): value for key, value in message.items() if value is not None}
    if "role" not in given and "from" in given:
        given = _from_sharegpt(given, where)
    if not isinstance(given.get("role"), str):
        raise ValueError(f"{where} must be a mapping with `role` and `content`")
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = _tool_calls(calls, where)
        given.setdefault("content", "")
    if not isinstance(given.get("content"), (str, list)):  # lists of parts: rl/data/media.py
        raise ValueError(f"the content of {where} must be a text")
    return _with_weight(given, where)


def _from_sharegpt(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """Returns a message {"from", "value"} of ShareGPT as one with role and content."""
    speaker = given["from"]
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise ValueError(f"{where} is from {speaker!r}; there are {', '.join(_SHAREGPT_ROLES)}")
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    said = {"content": given["value"]} if "value" in given else {}
    return {"role": _SHAREGPT_ROLES[speaker], **said, **rest}


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Returns calls of tools with their arguments as objects."""
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where}: `tool_calls` must be a list of mappings")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Mapping[str, object], where: str) -> dict[str, Any]:
    function = call.get("function")
    inner = call if function is None else function
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: a call of a tool has a `function` with `name` and `arguments`")
    written = inner.get("arguments") or {}
    arguments = parse(written) if isinstance(written, str) else _without_nulls(written)
    if isinstance(arguments, Malformed):
        start = str(written)[:40]
        raise ValueError(f"{where}: `arguments` of {inner['name']} are no JSON: {start!r}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: `arguments` of {inner['name']} must be an object")
    read = {**_without_nulls(inner), "arguments": arguments}
    return read if function is None else {**_without_nulls(call), "function": read}


def _with_weight(message: Mapping[str, object], where: str) -> dict[str, Any]:
    """Returns the message with `weight: 0` if one of _WEIGHTS says so, and none of these keys
    otherwise."""
    weights = {key: message[key] for key in _WEIGHTS if key in message}
    rest = {key: value for key, value in message.items() if key not in _WEIGHTS}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise ValueError(f"{where}: `{key}` must be 0 or 1, got {weight!r}")
        if weight and rest["role"] != "assistant" and key != "loss_mask":
            raise ValueError(
                f"{where}: `{key}: {weight}`, but only turns of the assistant are trained on"
            )
    if rest["role"] == "assistant" and 0 in weights.values():
        return {**rest, "weight": 0}
    return rest


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """Returns the tools in the column `tools` of a row of messages: JSON schemas of functions as
    chat templates take them, in a list or as its JSON text. Null and an empty list are None. Raises
    ValueError for anything else."""
    is_text = isinstance(value, str)
    if is_text and value:
        value = _from_text(value, "tools", "a list of JSON schemas of functions")
    if value is None or value in ("", []):
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(
            "`tools` must be a list of JSON schemas of functions; give another column another name"
        )
    return list(value) if is_text else [_without_nulls(each) for each in value]


def _without_nulls(value: object) -> Any:
    """Returns a value without the keys that are null: Arrow gives all objects of a column the same
    keys."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value
