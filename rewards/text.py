"""What a reward reads in a completion: its text, and the answer in it."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def text_of(completion: str | list[dict]) -> str:
    """Text of a completion or prompt: a string as it is; of a list of messages what the assistant said.

    Several assistant messages (a completion with tool calls in between) are joined by newlines; where no message is the
    assistant's (a prompt), all messages are. A message's content may be a string or a list of parts, of which those
    with a `text` count.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role") == "assistant"] or completion
    return "\n".join(_content(message.get("content")) for message in said)


def _content(content: str | list | None) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return content or ""


def answer_span(text: str, pattern: str | None = None) -> str | None:
    """The part of `text` that is its answer, or None where `pattern` occurs nowhere.

    With a pattern: group 1 of its last match (the whole match if it has no group). Without: the inside of the last
    `<answer>...</answer>`, else what follows the last `####` (GSM8K), else all of the text.
    """
    if pattern is not None:
        matches = list(re.finditer(pattern, text, re.DOTALL))
        if not matches:
            return None
        return matches[-1].group(1 if matches[-1].re.groups else 0)
    tagged = _TAGGED.findall(text)
    return tagged[-1] if tagged else text.rpartition("####")[2]


def boxed(text: str) -> str | None:
    """Inside of the last complete `\\boxed{...}` of `text`, braces matched; None where there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        opening = start + len("\\boxed")
        for position in range(opening, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening + 1 : position]
        end = start
    return None
