"""Defines rows of data as texts and messages, and as token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from rollout.media.expand import Expanded
    from rollout.media.reference import Reference

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """One row.

    prompt: text, or messages for the chat template. Contents are texts, or lists of parts where a
    row has pictures or
        sounds (rollout/media/rows.py).
    completion: demonstration as text, or None.
    messages: the full conversation of a demonstration in messages form, or None. `prompt` holds the
    messages before the
        last answer.
    pair: (chosen, rejected) answers to `prompt`, each a text or messages, or None.
    margin: margin of the pair.
    columns: the row's columns, for rewards. Pictures and sounds are lists `images` and `audios` of
    objects of
        rewards/workers/media.py.
    where: place of the row for messages, e.g. file:line.
    references: pictures and sounds of the conversation, those of a kind in the order of their
    parts.
    tools: JSON schemas of the tools that the chat template describes, or None.
    first: the number of the message from which on turns of the assistant are trained on.
    source: where the row came from: the name of its dataset, or the text of a column; None: the
    data have one source.
    """

    prompt: str | Messages
    completion: str | None = None
    messages: Messages | None = None
    pair: tuple[str | Messages, str | Messages] | None = None
    margin: float = 0.0
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    references: tuple[Reference, ...] = ()
    tools: list[dict[str, Any]] | None = None
    first: int = 0
    source: str | None = None


class Row(NamedTuple):
    """A sequence: its token ids, 1 where a token is trained on, and its pictures and sounds (None:
    it has none)."""

    ids: list[int]
    mask: list[int]
    expanded: Expanded | None = None


@dataclass(frozen=True)
class Problem:
    """An example with its prompt as token ids, and the pictures and sounds of the prompt (None: it
    has none)."""

    example: Example
    ids: list[int]
    expanded: Expanded | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt as token ids, each after the prompt.

    Like a sampled completion, an answer ends with the last token that the assistant writes.
    """

    chosen: Row
    rejected: Row
    margin: float


EncodedRow: TypeAlias = Problem | Row | Pair | Iterable[tuple[Row, float]]
"""What a stage takes from a row of data: a prompt, a sequence, a pair, or answers with labels."""


def expanded_of(row: EncodedRow) -> list[Expanded]:
    """Returns the pictures and sounds of a row of data: of a prompt, a sequence, a pair, or
    labelled answers."""
    if isinstance(row, Pair):
        parts = [row.chosen, row.rejected]
    elif isinstance(row, (Problem, Row)):
        parts = [row]
    else:
        parts = [answer for answer, _ in row]
    return [part.expanded for part in parts if part.expanded is not None]
