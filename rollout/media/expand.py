"""Prompts with pictures and sounds as tokens: each marker of the chat template becomes the tokens
of the rows.

The expansion is of text, before tokenizing, as transformers does it: line breaks around a picture
merge with those of the text. Rows belong to positions by an index that is made here, never by the
id of a token.

Prompts and masks follow the rules of rollout/text/chat.py. A token belongs to the assistant by the
character of the rendered text where it begins; the tokens of rows are never trained on.

Axes: T tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policy.media import Item
from rollout.media.processor import KINDS, NOUNS, Kind, MediaError
from rollout.media.processors import Processors
from rollout.media.reference import Reference
from rollout.text import chat
from rollout.text.chat import Messages, render_text
from rollout.text.interface import Tokenizer


@dataclass(frozen=True, eq=False)
class Expanded:
    """A rendered conversation as tokens: a prompt, or a prompt with its answer.

    tokens: int32[T].
    index: int32[T], the number of the row among those of the conversation, -1 at text.
    turns: int32[T, 3], rotary positions by (time, height, width); None if all three are the
    position.
    until: int32[T], the position of the last token of the picture, the token's own elsewhere; None
    in causal families.
    items: pictures, tiles and clips in the order of their rows.
    starts: int32[T], the character of the rendered text at which a token begins; all tokens of a
    picture begin at its
        marker.
    references: the contents in the order of the items; a picture cut into tiles has several items.
    """

    tokens: np.ndarray
    index: np.ndarray
    turns: np.ndarray | None
    until: np.ndarray | None
    items: tuple[Item, ...]
    starts: np.ndarray
    references: tuple[Reference, ...] = ()

    @property
    def rows(self) -> int:
        """Returns the number of rows of all items."""
        return sum(item.rows for item in self.items)

    @property
    def owners(self) -> list[int]:
        """Returns the number of the reference that each item is of."""
        return [number - 1 for number in itertools.accumulate(item.is_first for item in self.items)]

    def end_before(self, end: int) -> int:
        """Returns the most tokens, at most `end`, that cut off no part of a picture or sound, with
        what its marker stands for besides its rows: tiles have separators between them."""
        if not 0 < end < len(self.starts) or self.starts[end - 1] != self.starts[end]:
            return end
        same = np.flatnonzero(self.starts == self.starts[end])
        return int(same[0]) if (self.index[same] >= 0).any() else end

    def first(self, end: int) -> Expanded:
        """Returns the first `end` tokens. `end` must not cut off a part of a picture or sound."""
        turns, until = (
            None if array is None else array[:end] for array in (self.turns, self.until)
        )
        cut = {"tokens": self.tokens[:end], "index": self.index[:end], "starts": self.starts[:end]}
        return dataclasses.replace(self, turns=turns, until=until, **cut)


def expand(
    tokenizer: Tokenizer,
    messages: Messages,
    references: Sequence[Reference],
    processors: Processors,
    add_generation_prompt: bool = True,
) -> Expanded:
    """Renders messages with the chat template and expands their pictures and sounds.

    messages: contents are texts or lists of parts; a part {"type": "image"} or {"type": "audio"}
    stands for the next of
        `references`.

    Raises MediaError as `expand_text`, and for a text of a message that contains a reserved token;
    ChatError as `render_text`.
    """
    refuse_reserved(messages, processors)
    return expand_text(
        tokenizer, render_text(tokenizer, messages, add_generation_prompt), references, processors
    )


def expand_prompt(
    tokenizer: Tokenizer,
    messages: Messages,
    references: Sequence[Reference],
    processors: Processors,
) -> Expanded:
    """Converts a prompt as `chat.render_prompt` does. Raises MediaError and ChatError as `expand`
    and that function."""
    expanded = expand(tokenizer, messages, references, processors)
    chat.check_one_beginning(tokenizer, expanded.tokens[:2].tolist())
    return expanded


def expand_answer(
    tokenizer: Tokenizer,
    messages: Messages,
    references: Sequence[Reference],
    processors: Processors,
    first: int,
) -> tuple[Expanded, list[int]]:
    """Converts a prompt of `first` messages with its answer as `chat.encode_answer` does. Returns
    (conversation, 1 at each token that is trained on).

    Raises MediaError and ChatError as `expand` and that function.
    """
    refuse_reserved(messages, processors)
    rendered = chat.render_answer(tokenizer, messages, first)
    return _expand_rendered(tokenizer, rendered, messages, references, processors)


def expand_conversation(
    tokenizer: Tokenizer,
    messages: Messages,
    references: Sequence[Reference],
    processors: Processors,
    train_on: str = "assistant",
    history: str = "template",
    first: int = 0,
) -> list[tuple[Expanded, list[int]]]:
    """Converts a conversation to rows (conversation, 1 at each token that is trained on) as
    `chat.encode_conversation` does; `train_on`, `history` and `first` as there.

    Raises MediaError and ChatError as `expand` and that function.
    """
    refuse_reserved(messages, processors)
    renderings = chat.trained_renderings(tokenizer, messages, train_on, history, first)
    rows = [
        _expand_rendered(tokenizer, each, messages, references, processors) for each in renderings
    ]
    if train_on != "all":
        return rows
    return [(row, _without_rows(chat.all_but_first(len(row.tokens)), row)) for row, _ in rows]


def _expand_rendered(
    tokenizer: Tokenizer,
    rendered: chat.Rendered,
    messages: Messages,
    references: Sequence[Reference],
    processors: Processors,
) -> tuple[Expanded, list[int]]:
    shown = _references_of(messages[: rendered.messages], references)
    expanded = expand_text(tokenizer, rendered.text, shown, processors)
    chat.check_one_beginning(tokenizer, expanded.tokens[:2].tolist())
    return expanded, _without_rows(chat.mask_of(rendered.spans, expanded.starts.tolist()), expanded)


def _references_of(messages: Messages, references: Sequence[Reference]) -> list[Reference]:
    """Returns the references of the parts of these messages, the first ones of a conversation."""
    contents = (message["content"] for message in messages)
    kinds = [
        part["type"]
        for content in contents
        if not isinstance(content, str)
        for part in content or ()
    ]
    shown: list[Reference] = []
    for kind in KINDS:
        shown += [reference for reference in references if reference.kind == kind][
            : kinds.count(kind)
        ]
    return shown


def _without_rows(mask: list[int], expanded: Expanded) -> list[int]:
    return [
        trained if row < 0 else 0
        for trained, row in zip(mask, expanded.index.tolist(), strict=True)
    ]


def refuse_reserved(messages: Messages, processors: Processors) -> None:
    """Raises MediaError if a text of a message contains a token that stands for a picture or a
    sound."""
    for number, message in enumerate(messages):
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [p.get("text") for p in content or ()]
        for processor in processors.all:
            for token in processor.reserved:
                if any(token in part for part in parts if part):
                    raise MediaError(
                        f"message {number} contains {token!r}, which stands for a "
                        f"{NOUNS[processor.kind]}; remove it from the text, or give the "
                        f"{NOUNS[processor.kind]} as a part of the message"
                    )


def expand_text(
    tokenizer: Tokenizer, text: str, references: Sequence[Reference], processors: Processors
) -> Expanded:
    """Replaces the markers of a rendered text by the tokens of `references`, and tokenizes.

    Raises MediaError if markers and references of a kind differ in number, if the model does not
    read a kind, for a size that it cannot represent, and if the tokenizer does not know the token
    of a row.
    """
    pieces, starts, ordered = _with_replacements(text, references, processors)
    groups = [processors.of(each.kind).items(each.digest, each.size) for each in ordered]
    encoded = tokenizer("".join(pieces), add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.asarray(encoded["input_ids"], np.int32)
    items = tuple(item for each in groups for item in each)
    index = _index(tokenizer, tokens, items, processors)
    where = {row: place for place, row in enumerate(index.tolist()) if row >= 0}
    return Expanded(
        tokens=tokens,
        index=index,
        turns=_turns(index, items, where, processors),
        until=_until(len(tokens), items, where, processors),
        items=items,
        starts=_origins(
            np.asarray([a for a, _ in encoded["offset_mapping"]], np.int64), pieces, starts
        ),
        references=tuple(ordered),
    )


class Pieces(NamedTuple):
    """An expanded text: its pieces, which alternate between text and the replacement of a marker,
    the character of the text before the expansion where each begins, and the references of the
    markers in order."""

    texts: list[str]
    starts: list[int]
    references: list[Reference]


def _with_replacements(
    text: str, references: Sequence[Reference], processors: Processors
) -> Pieces:
    """Replaces the markers of a rendered text."""
    waiting: dict[Kind, list[Reference]] = {
        kind: [r for r in references if r.kind == kind] for kind in KINDS
    }
    markers: dict[str, Kind] = {
        processors.of(kind).marker: kind for kind, group in waiting.items() if group
    }
    for processor in processors.all:
        kind = processor.kind
        given = len(waiting[processor.kind])
        if (written := text.count(processor.marker)) != given:
            raise MediaError(
                f"{given} {NOUNS[kind]}s, but the chat template wrote {written} times "
                f"{processor.marker!r}; each needs one part in the messages"
            )
    if not markers:
        return Pieces([text], [0], [])
    pieces = []
    starts = []
    ordered = []
    end = 0
    for match in re.finditer("|".join(map(re.escape, markers)), text):
        reference = waiting[markers[match[0]]].pop(0)
        try:
            replacement = processors.of(reference.kind).text(reference.size)
        except MediaError as error:
            raise MediaError(
                f"{reference.where}: {error}" if reference.where else str(error)
            ) from None
        pieces += [text[end : match.start()], replacement]
        starts += [end, match.start()]
        ordered.append(reference)
        end = match.end()
    return Pieces([*pieces, text[end:]], [*starts, end], ordered)


def _index(
    tokenizer: Tokenizer, tokens: np.ndarray, items: Sequence[Item], processors: Processors
) -> np.ndarray:
    """Numbers the tokens of rows. Raises MediaError if they are not as many as the rows of the
    items."""
    index = np.full(len(tokens), -1, np.int32)
    kinds: set[Kind] = {item.kind for item in items}
    ids = {kind: tokenizer.convert_tokens_to_ids(processors.of(kind).row_token) for kind in kinds}
    at_row = np.isin(tokens, [i for i in ids.values() if i is not None])
    rows = sum(item.rows for item in items)
    expected = np.repeat([ids[item.kind] or -1 for item in items], [item.rows for item in items])
    if at_row.sum() != rows or not np.array_equal(tokens[at_row], expected):
        names = " and ".join(repr(processors.of(kind).row_token) for kind in sorted(kinds))
        raise MediaError(
            f"{rows} rows of pictures and sounds, but {at_row.sum()} tokens {names} in the "
            "prompt: the tokenizer must know each as one token, and no text may contain one"
        )
    index[at_row] = np.arange(rows)
    return index


def _turns(
    index: np.ndarray, items: Sequence[Item], where: dict[int, int], processors: Processors
) -> np.ndarray | None:
    """Returns int32[T, 3], or None if all three positions are those of the tokens.

    A picture of h x w rows at position c has (c, c + y, c + x), and the next token has c + max(h,
    w).
    """
    if not any(item.kind == "image" and processors.of("image").sections for item in items):
        return None
    merge = processors.of("image").merge
    turns = np.zeros((len(index), 3), np.int32)
    place = counter = row = 0
    for item in items:
        first = where[row]
        row += item.rows
        if item.kind != "image":
            continue
        turns[place:first] = np.arange(counter, counter + first - place)[:, None]
        counter += first - place
        high = item.shape[0] // merge
        wide = item.shape[1] // merge
        y, x = np.divmod(np.arange(high * wide), wide)
        turns[first : first + high * wide] = counter + np.stack([np.zeros_like(y), y, x], axis=1)
        place = first + high * wide
        counter = counter + max(high, wide)
    turns[place:] = np.arange(counter, counter + len(index) - place)[:, None]
    return turns


def _until(
    length: int, items: Sequence[Item], where: dict[int, int], processors: Processors
) -> np.ndarray | None:
    if not any(processors.of(item.kind).looks_ahead for item in items):
        return None
    until = np.arange(length, dtype=np.int32)
    row = 0
    for item in items:
        first = where[row]
        row = row + item.rows
        if processors.of(item.kind).looks_ahead:
            until[first : first + item.rows] = first + item.rows - 1
    return until


def _origins(offsets: np.ndarray, pieces: Sequence[str], starts: Sequence[int]) -> np.ndarray:
    """Maps characters of the expanded text to those of the rendered text."""
    begins = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])[:-1]])
    piece = np.searchsorted(begins, offsets, side="right") - 1
    inside = np.where(
        piece % 2 == 0, offsets - begins[piece], 0
    )  # pieces with odd numbers replace a marker
    return (np.asarray(starts)[piece] + inside).astype(np.int32)
