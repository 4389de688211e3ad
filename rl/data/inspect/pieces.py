"""Cuts a row into the pieces that are shown: tokens, and the tokens of a picture or a sound as one
piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from policy.media import Item
from rl.data.inspect.stage_rows import Encoded, Kind, StageRows
from rollout.media.expand import Expanded
from rollout.media.processor import KINDS, NOUNS
from rollout.media.reference import Reference


class RowPiece(NamedTuple):
    """A token, or all tokens of a picture, a tile or a sound.

    place: number of the first token. count: number of tokens. token: the id of the first. text: of
    the token, or what stands there, in brackets.
    """

    place: int
    count: int
    token: int
    kind: Kind
    text: str


def pieces(stage: StageRows, row: Encoded) -> list[RowPiece]:
    """Returns the pieces of a row in order."""
    kinds = row.kinds(stage.stops)
    decode = stage.tokenizer.decode
    names = [] if row.expanded is None else labels(row.expanded)
    result = []
    for item, places in itertools.groupby(range(len(row.ids)), key=_item_of(row)):
        group = list(places)
        if item is not None:
            result.append(
                RowPiece(group[0], len(group), row.ids[group[0]], kinds[group[0]], names[item])
            )
            continue
        texts = (decode([row.ids[place]], skip_special_tokens=False) for place in group)
        result += [
            RowPiece(n, 1, row.ids[n], kinds[n], text) for n, text in zip(group, texts, strict=True)
        ]
    return result


def text_of(stage: StageRows, row: Encoded) -> str:
    """Returns the text of a row, with each picture and sound as its piece."""
    names = [] if row.expanded is None else labels(row.expanded)
    parts = []
    for item, places in itertools.groupby(range(len(row.ids)), key=_item_of(row)):
        ids = [row.ids[place] for place in places]
        parts.append(
            stage.tokenizer.decode(ids, skip_special_tokens=False) if item is None else names[item]
        )
    return "".join(parts)


def _item_of(row: Encoded) -> Any:
    """Returns a function from the place of a token to the number of its item, None at text."""
    if row.expanded is None:
        return lambda place: None
    owner = [number for number, item in enumerate(row.expanded.items) for _ in range(item.rows)]
    items = [None if each < 0 else owner[each] for each in row.expanded.index.tolist()]
    return lambda place: items[place] if place < len(items) else None


def labels(expanded: Expanded) -> list[str]:
    """Returns the text of each item, such as `[picture 1: 12x16 rows 0..191, 640x480 px,
    photo.png]`."""
    owners = expanded.owners
    result = []
    row = 0
    numbers = {
        kind: [n for n, each in enumerate(expanded.references) if each.kind == kind]
        for kind in KINDS
    }
    for place, item in enumerate(expanded.items):
        owner = owners[place]
        reference = expanded.references[owner]
        tile = ""
        if owners.count(owner) > 1:
            tile = f", tile {place - owners.index(owner) + 1}"
        name = f"{NOUNS[item.kind]} {numbers[item.kind].index(owner) + 1}{tile}"
        result.append(
            f"[{name}: {_grid(item)}rows {row}..{row + item.rows - 1}, {_content(reference)}]"
        )
        row += item.rows
    return result


def _grid(item: Item) -> str:
    """Returns the grid of rows of a picture, as height x width; empty where the rows are no
    grid."""
    height, width = item.shape
    joined = math.isqrt(height * width // item.rows)
    if item.kind != "image" or (height // joined) * (width // joined) != item.rows:
        return ""
    return f"{height // joined}x{width // joined} "


def _content(reference: Reference) -> str:
    """Returns the size and the file of a content."""
    source = reference.source
    name = (
        source.name
        if isinstance(source, Path)
        else "bytes"
        if isinstance(source, bytes)
        else "array"
    )
    one, other = reference.size
    size = (
        f"{other}x{one} px" if reference.kind == "image" else f"{one / other:.2f} s at {other} Hz"
    )
    return f"{size}, {name}"


def counts(expanded: Expanded | None) -> str:
    """Returns how many pictures and sounds a row has and how many tokens they fill, to follow the
    row's own counts; empty without any."""
    if expanded is None:
        return ""
    return f", {_named([each.kind for each in expanded.references])} of {expanded.rows} tokens"


def statistics(rows: Sequence[Encoded]) -> str:
    """Returns the pictures and sounds of all rows, and the tokens that they fill in a row; empty
    without any."""
    kinds = [
        each.kind for row in rows if row.expanded is not None for each in row.expanded.references
    ]
    if not kinds:
        return ""
    filled = [0 if row.expanded is None else row.expanded.rows for row in rows]
    return (
        f", {_named(kinds)} of {sum(filled) / len(rows):.1f} tokens in a row on average, "
        f"{max(filled)} at most"
    )


def _named(kinds: Sequence[str]) -> str:
    def parts() -> Iterator[str]:
        for kind in KINDS:
            if count := sum(each == kind for each in kinds):
                yield f"{count} {NOUNS[kind]}{'s' if count > 1 else ''}"

    return " and ".join(parts())
