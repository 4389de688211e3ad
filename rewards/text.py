"""Extracts the text of a completion and the answer in a text, and makes texts of others safe to
print."""

from __future__ import annotations

import re
import shlex

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?:(?P<brace>\{)|(?P<bare>[^\s${}]*))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: object) -> str:
    """Returns a text with control characters as pictures, so that a completion or a row cannot
    steer a terminal."""
    return _CONTROL.sub(
        lambda match: chr(0x2400 + ord(match[0])) if match[0] < " " else "\ufffd", str(text)
    )


def quoted(word: object) -> str:
    """Returns a path or an override as one word of a command to type: in quotes if it has blanks or
    signs."""
    return shlex.quote(str(word))


def text_of(completion: str | list[dict]) -> str:
    """Returns the text of a completion or prompt: a string unchanged, or the assistant's part of a
    list of messages.

    Several assistant messages (a completion with tool calls between) are joined by newlines. If no
    message is the assistant's (a prompt), all messages are joined. The content of a message is a
    string or a list of parts; parts without `text` are ignored.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role") == "assistant"] or completion
    return "\n".join(_content(message.get("content")) for message in said)


def _content(content: str | list | None) -> str:
    if isinstance(content, list):
        return "".join(
            part if isinstance(part, str) else str(part.get("text", "")) for part in content
        )
    return content or ""


def in_form_of(prompt: str | list[dict], text: str) -> str | list[dict]:
    """Returns a completion in the form of its prompt: text after text, a message of the assistant
    after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def answer_span(text: str, pattern: str | None = None) -> str | None:
    """Returns the part of `text` that is its answer, or None if `pattern` has no match.

    With a pattern, this is group 1 of the last match (the full match if the pattern has no group).
    Without a pattern, it is the inside of the last `<answer>...</answer>`, else the text after the
    last `####` (GSM8K), else all of it.
    """
    if pattern is not None:
        matches = list(re.finditer(pattern, text, re.DOTALL))
        if not matches:
            return None
        return matches[-1].group(1 if matches[-1].re.groups else 0)
    tagged = _TAGGED.findall(text)
    return tagged[-1] if tagged else text.rpartition("####")[2]


def boxed(text: str) -> str | None:
    """Returns the inside of the last box of `text`, or None if it has none.

    A box is \\boxed{...} or \\fbox{...}, braces matched, or \\boxed before a number without braces.
    A box that is not closed holds nothing: the text was cut in it.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    match = boxes[-1]
    if not match["brace"]:
        return match["bare"]
    depth = 1
    for position in range(match.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[match.end() : position]
    return ""
