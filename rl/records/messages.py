"""Writes and reads pictures and sounds in a line of samples.jsonl: `media`, and parts of the
messages of `prompt`.

A line holds no content of them. Imports neither Pillow nor jax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from policy.json_types import JsonObject, JsonValue
from rl.records.schema import MediaEntry, RawLine
from rollout.media.processor import NOUNS

if TYPE_CHECKING:
    from rollout.media.expand import Expanded

Piece = str | MediaEntry
"""A text, or a picture or sound: its entry of `media` in the line, or only its `kind` where the
line has no entry."""
DIGEST = re.compile(r"[0-9a-f]{64}")
_DATA_URI = re.compile(r"\s*data:[^,\s]*,", re.IGNORECASE)


def entries(expanded: Expanded | None) -> list[MediaEntry]:
    """Returns `media` of a line: one entry for each picture or sound, the rows of its tiles added
    up."""
    if expanded is None:
        return []
    rows = [0] * len(expanded.references)
    for item, owner in zip(expanded.items, expanded.owners, strict=True):
        rows[owner] += item.rows
    result = []
    for number, reference in enumerate(expanded.references):
        first, second = reference.size
        size = {"width": second, "height": first}
        if reference.kind == "audio":
            size = {"seconds": round(first / second, 3), "rate": second}
        entry = {"kind": reference.kind, "digest": reference.digest, **size}
        result.append(entry | {"rows": rows[number]})
    return result


def without_contents(prompt: str | Sequence[JsonObject]) -> str | list[JsonObject]:
    """Returns a prompt whose parts other than texts hold their type only."""
    if isinstance(prompt, str):
        return prompt
    return [
        {**message, "content": [_without_content(part) for part in content]}
        if isinstance(content := message.get("content"), (list, tuple))
        else message
        for message in prompt
    ]


def is_data_uri(text: str) -> bool:
    """Tells whether a text holds a file, such as a picture, in place of its address."""
    return _DATA_URI.match(text) is not None


def messages(record: RawLine, name: str) -> Iterator[tuple[str, list[Piece]]]:
    """Yields (role, pieces) of the messages of `prompt` or `completion`; a plain text has the role
    "". A completion is shown with its special tokens (`raw`).

    The n-th part of a kind in the prompt is the n-th entry of this kind in `media`.
    """
    value = record.get(name)
    waiting = _entries(record) if name == "prompt" else {}
    if name == "completion" and isinstance(record.get("raw"), str):
        value = record["raw"]
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        for each in value:
            content = each.get("content")
            parts = content if isinstance(content, list) else [content]
            yield str(each.get("role", "")), [_piece(part, waiting) for part in parts]
    elif value is not None:
        yield "", [_piece(value, waiting)]


def describe_item(item: MediaEntry) -> str:
    """Returns a picture or sound as text, e.g. `picture 640x480, 192 rows, digest 12ab34cd..`."""
    number = {key: value for key, value in item.items() if isinstance(value, (int, float))}
    facts = [f"{number['rows']:,} rows"] if "rows" in number else []
    noun = NOUNS[item["kind"]]
    if "width" in number and "height" in number:
        noun += f" {number['width']}x{number['height']}"
    if "seconds" in number:
        noun += f" {number['seconds']:g} s"
        facts = [f"{number['rate']:,} Hz", *facts] if "rate" in number else facts
    if DIGEST.fullmatch(digest := str(item.get("digest"))):
        facts.append(f"digest {digest[:8]}..")
    return ", ".join([noun, *facts])


def flat(pieces: Sequence[Piece]) -> str:
    """Returns the pieces of a message as one text, each picture or sound in brackets on a line of
    its own."""
    text = ""
    for number, piece in enumerate(pieces):
        separate = number and not (isinstance(piece, str) and isinstance(pieces[number - 1], str))
        own = piece if isinstance(piece, str) else f"[{describe_item(piece)}]"
        text += "\n" + own.lstrip("\n") if separate and not text.endswith("\n") else own
    return text


def start(record: RawLine, name: str, count: int) -> str:
    """Returns the beginning of the last message of `prompt` or `completion`, on one line of at most
    `count` characters, and "..." where it is cut."""
    last = [pieces for _, pieces in messages(record, name)][-1:]
    texts = [
        each if isinstance(each, str) else f" [{NOUNS[each['kind']]}] "
        for pieces in last
        for each in pieces
    ]
    line = " ".join("".join(texts)[: 4 * count].split())
    return line if len(line) <= count else line[:count] + "..."


def pictures(record: RawLine) -> list[MediaEntry]:
    """Returns the entries of the pictures of a line that have a digest."""
    entries = _entries(record).get("image", [])
    return [each for each in entries if DIGEST.fullmatch(str(each.get("digest")))]


def identity(record: RawLine) -> str:
    """Returns a text that is equal for equal prompts: the same texts with the same pictures and
    sounds."""
    prompt = json.dumps(record.get("prompt"), ensure_ascii=False)
    if media := record.get("media"):
        entries = media if isinstance(media, list) else ()
        prompt += json.dumps(
            [each.get("digest") if isinstance(each, dict) else None for each in entries]
        )
    return prompt


def _without_content(part: JsonValue) -> JsonValue:
    return (
        {"type": part.get("type")}
        if isinstance(part, Mapping) and part.get("type") != "text"
        else part
    )


def _entries(record: RawLine) -> dict[str, list[MediaEntry]]:
    """Returns the entries of `media` by kind, in their order."""
    result: dict[str, list[MediaEntry]] = {}
    media = record.get("media")
    for each in media if isinstance(media, list) else ():
        if isinstance(each, dict) and each.get("kind") in NOUNS:
            result.setdefault(each["kind"], []).append(cast(MediaEntry, each))
    return result


def _piece(part: object, waiting: dict[str, list[MediaEntry]]) -> Piece:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type")
        text = part.get("text")
        if kind == "text" and isinstance(text, str):
            return text
        if kind in NOUNS:
            return waiting[kind].pop(0) if waiting.get(kind) else {"kind": kind}
    return json.dumps(part, ensure_ascii=False)
