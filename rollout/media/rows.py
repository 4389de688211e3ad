"""Rows of data with pictures and sounds in one form: messages with parts, and references in their
order.

| a row has | as in |
|---|---|
| parts {"type": "image"} and a column `image` or `images` | TRL, Hugging Face datasets |
| parts {"type": "image", "image": ...} | Qwen |
| parts {"type": "image_url", "image_url": {"url": ...}} | OpenAI |
| texts and a column: the pictures come before the first text of the user | TRL |
| `<image>` in a text, as often as the column has pictures | verl, LLaMA-Factory |

Sounds: parts `audio`, `audio_url` and `input_audio`, columns `audio` and `audios`, `<audio>` in a
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rewards.suggest import nearest
from rollout.media.processor import KINDS, NOUNS, Kind, MediaError
from rollout.media.reference import Reference, refer

_TYPES: dict[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
COLUMNS: dict[Kind, tuple[str, str]] = {"image": ("image", "images"), "audio": ("audio", "audios")}
"""Names of the columns of a kind: of one value, and of a list."""
_PAYLOADS = ("image", "image_url", "audio", "audio_url", "input_audio", "url", "path", "bytes")
_TAG = re.compile(r"<(image|audio)>")
_VIDEO = ("video", "videos")

Messages = list[dict[str, Any]]


def first_kind(content: object) -> Kind | None:
    """Returns the kind of the first part of a content that is a picture or a sound; None: it has
    none."""
    parts = content if isinstance(content, (list, tuple)) else ()
    return next(
        (_TYPES[p["type"]] for p in parts if isinstance(p, Mapping) and p.get("type") in _TYPES),
        None,
    )


@dataclass
class _Row:
    """What has been read of a row. A payload of None stands for the next value of the column of its
    kind."""

    columns: dict[Kind, list[Any]]
    payloads: list[tuple[Kind, Any]] = field(default_factory=list)

    def part(self, kind: Kind, payload: object = None) -> dict[str, Any]:
        self.payloads.append((kind, payload))
        return {"type": kind}

    def drawn(self, kind: Kind) -> int:
        """Returns how many parts take a value of the column."""
        return sum(one == kind and payload is None for one, payload in self.payloads)


def normalise(
    prompt: str | Sequence[Mapping[str, object]],
    columns: Mapping[str, object],
    where: str,
    base: Path,
) -> tuple[str | Messages, tuple[Reference, ...]]:
    """Returns (prompt, references; those of a kind in the order of their parts).

    The contents of messages become texts, or lists of parts {"type": "text", "text": ...}, {"type":
    "image"} and {"type": "audio"}. A plain prompt with pictures becomes a message of the user;
    without, it stays as it is.

    columns: all columns of the row.
    where: place of the row, e.g. file:line, for the messages of references. The caller adds it to
    errors of this call. base: folder that relative paths start from, that of the data file.

    Raises MediaError for parts and columns that disagree, unknown parts, video, and contents that
    `refer` refuses.
    """
    row = _Row({kind: _column(kind, columns) for kind in KINDS})
    if any(_filled(columns.get(name)) for name in _VIDEO):
        raise MediaError("the row has a column of videos; only pictures and sounds are supported")
    if isinstance(prompt, str):
        if not any(row.columns.values()):
            return prompt, ()
        prompt = [{"role": "user", "content": prompt}]
    messages = [
        dict(message, content=_content(row, number, message))
        for number, message in enumerate(prompt)
    ]
    for kind in reversed(KINDS):  # each goes to the front, so that pictures come before sounds
        _insert(row, kind, messages)
    return messages, _references(row, where, base)


def _column(kind: Kind, columns: Mapping[str, object]) -> list[Any]:
    names = [name for name in COLUMNS[kind] if _filled(columns.get(name))]
    if len(names) > 1:
        raise MediaError(
            f"the row has a column {names[0]!r} and a column {names[1]!r}; leave one of them out"
        )
    if not names:
        return []
    value = columns[names[0]]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(v is None for v in values):
        raise MediaError(f"{NOUNS[kind]} {values.index(None) + 1} of column {names[0]!r} is null")
    return values


def _filled(value: object) -> bool:
    return value is not None and (isinstance(value, np.ndarray) or value not in ([], (), ""))


def _content(row: _Row, number: int, message: Mapping[str, object]) -> str | list[dict[str, Any]]:
    """Returns the content of a message in the normal form."""
    content = message.get("content")
    before = len(row.payloads)
    if isinstance(content, str):
        parts = _split(row, content)
    elif isinstance(content, (list, tuple)):
        parts = [part for one in content for part in _part(row, number, one)]
    else:
        raise MediaError(f"the content of message {number} must be a text or a list of parts")
    if len(row.payloads) == before:
        return "".join(part["text"] for part in parts)
    if message.get("role") == "assistant":
        raise MediaError(
            f"message {number} of the assistant has a {NOUNS[row.payloads[before][0]]}; answers "
            "are texts"
        )
    return parts


def _part(row: _Row, number: int, part: object) -> list[dict[str, Any]]:
    if isinstance(part, str):
        return _split(row, part)
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise MediaError(f"message {number}: a part must be a mapping with `type`, is {part!r:.80}")
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise MediaError(f"message {number}: a part of type 'text' needs a `text`")
        return _split(row, part["text"])
    if kind in _VIDEO or kind == "video_url":
        raise MediaError(f"message {number} has a video; only pictures and sounds are supported")
    if kind not in _TYPES:
        raise MediaError(
            f"message {number}: unknown type of part {kind!r}{nearest(kind, ['text', *_TYPES])}"
        )
    # Arrow gives all parts of a column the same keys, with null where a part has none.
    payload = next((part[key] for key in _PAYLOADS if part.get(key) is not None), None)
    if kind == "audio" and part.get("array") is not None:
        payload = part
    return [row.part(_TYPES[kind], payload)]


def _split(row: _Row, text: str) -> list[dict[str, Any]]:
    """Cuts a text at its tags. A tag of a kind that has no column is text."""
    parts = []
    end = 0
    for tag in _TAG.finditer(text):
        kind: Kind = "image" if tag[1] == "image" else "audio"
        if not row.columns[kind]:
            continue
        if tag.start() > end:
            parts.append({"type": "text", "text": text[end : tag.start()]})
        parts.append(row.part(kind))
        end = tag.end()
    if end < len(text) or not parts:
        parts.append({"type": "text", "text": text[end:]})
    return parts


def _insert(row: _Row, kind: Kind, messages: Messages) -> None:
    """Puts the values of a column that no part asks for before the first text of the user."""
    values = row.columns[kind]
    if not values or any(one == kind for one, _ in row.payloads):
        return
    user = next((message for message in messages if message.get("role") == "user"), None)
    if user is None:
        raise MediaError(
            f"the row has {len(values)} {NOUNS[kind]}s, but no message of the user to put them in"
        )
    rest = user["content"]
    parts = [{"type": "text", "text": rest}] if isinstance(rest, str) else rest
    # No other part is of this kind, and `expand` counts each kind by itself.
    first: list[tuple[Kind, Any]] = [(kind, None) for _ in values]
    row.payloads = first + row.payloads
    user["content"] = [{"type": kind} for _ in values] + parts


def _references(row: _Row, where: str, base: Path) -> tuple[Reference, ...]:
    for kind, values in row.columns.items():
        if (drawn := row.drawn(kind)) != len(values):
            noun = NOUNS[kind]
            own = sum(one == kind for one, _ in row.payloads) - drawn
            rest = f" and {own} with a {noun} of their own" if own else ""
            raise MediaError(
                f"{len(values)} {noun}s in the columns, but {drawn} parts or tags that take "
                f"one{rest}; they must agree"
            )
    waiting = {kind: iter(values) for kind, values in row.columns.items()}
    counts = dict.fromkeys(row.columns, 0)
    references = []
    for kind, payload in row.payloads:
        counts[kind] += 1
        name = f"{NOUNS[kind]} {counts[kind]}"
        value = next(waiting[kind]) if payload is None else payload
        try:
            references.append(refer(kind, value, base, f"{where}: {name}" if where else name))
        except MediaError as error:
            raise MediaError(f"{name}: {error}") from None
    return tuple(references)
