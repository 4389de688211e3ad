"""Describes samples as JSON: short ones for lists, complete ones with their tokens, and their
relatives."""

from __future__ import annotations

import math
from typing import TypedDict

from rl.records import thumbnails
from rl.records.messages import Piece, describe_item, messages, start
from rl.records.schema import MediaEntry
from rl.views.viewer import tokens as token_texts
from rl.views.viewer.index import Index
from rl.views.viewer.search import SamplePlace, places

_PEEK = 160
_READ = 64  # completions of a group whose beginnings are read
_MOST = 500  # relatives of a sample that are listed


class ShortSample(TypedDict):
    """The numbers of a sample, as `IndexedSample` has them; None for one that is not finite."""

    id: str
    stage: str
    step: int
    prompt_id: int
    sample: int
    version: int
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float | None
    gap: float | None
    len: int
    finish: str
    faults: list[str]
    eval: bool


class ListedSample(ShortSample):
    """A sample of a list: with the beginnings of its prompt and completion."""

    prompt: str
    completion: str


class ShownMedia(MediaEntry):
    """A picture or sound with a text about it, and the file of its thumbnail if there is one."""

    about: str
    thumbnail: str | None


class FullSample(ShortSample):
    """A sample of a page. record: its line without `tokens`. messages: [role, pieces] of each
    message of `prompt` and `completion`."""

    record: dict[str, object]
    messages: dict[str, list[tuple[str, list[str | ShownMedia]]]]
    tokens: token_texts.TokenIds
    group: list[ListedSample | ShortSample]
    others: list[ShortSample]


def short(index: Index, place: SamplePlace) -> ShortSample:
    """Returns the numbers of a sample, without its texts and without reading its line."""
    own = place.numbers
    return {
        "id": place.id,
        "stage": own.stage,
        "step": own.step,
        "prompt_id": own.prompt,
        "sample": own.sample,
        "version": own.version,
        "reward": number(own.reward),
        "rewards": {name: number(score) for name, score in own.scores.items()},
        "advantage": number(own.advantage),
        "gap": number(own.logp_diff),
        "len": own.len,
        "finish": own.finish,
        "faults": own.faults,
        "eval": own.eval,
    }


def listed(index: Index, place: SamplePlace) -> ListedSample:
    """Returns `short` with the beginnings of prompt and completion. Raises as `Place.record`."""
    record = place.record()
    return {
        **short(index, place),
        "prompt": start(record, "prompt", _PEEK // 2),
        "completion": start(record, "completion", _PEEK),
    }


def full(index: Index, place: SamplePlace, most: int = _MOST) -> FullSample:
    """Returns everything about a sample: record, pieces of its messages, tokens without their
    texts, its group, and the same row of the data at other steps.

    most: listed relatives of each kind. Raises as `Place.record`.
    """
    record = place.record()
    own = place.tokens(record)
    ids = record.get("tokens")
    return {
        **short(index, place),
        "record": {key: value for key, value in record.items() if key != "tokens"},
        "messages": {
            name: [
                (role, [_shown(index, piece) for piece in pieces])
                for role, pieces in messages(record, name)
            ]
            for name in ("prompt", "completion")
        },
        "tokens": (
            token_texts.numbers(own) if len(own) else {"id": ids if isinstance(ids, list) else []}
        ),
        "group": [
            (listed if number < _READ else short)(index, each)
            for number, each in enumerate(group(index, place, most))
        ],
        "others": [short(index, each) for each in others(index, place, most)],
    }


def _shown(index: Index, piece: Piece) -> str | ShownMedia:
    """Returns a piece of a message; a picture or sound with its text `about`, and the name of its
    `thumbnail` or None.
    """
    if isinstance(piece, str):
        return piece
    file = thumbnails.find(index.directory, str(piece.get("digest")))
    return {**piece, "about": describe_item(piece), "thumbnail": file and file.name}


def with_texts(sample: FullSample, texts: token_texts.TokenTexts) -> FullSample:
    """Returns the result of `full` with the texts of its tokens."""
    tokens = sample["tokens"]
    return {**sample, "tokens": {**tokens, "text": texts.texts(tokens["id"])}}


def group(index: Index, place: SamplePlace, most: int = _MOST) -> list[SamplePlace]:
    """Returns the completions of the same prompt at the same step, this one included, at most
    `most`."""
    own = place.numbers
    stage = index.names["stage"].index(own.stage)
    ids = index.ids(
        "SELECT id FROM sample WHERE prompt = ? AND step = ? AND stage = ? ORDER BY id LIMIT ?",
        (own.prompt, own.step, stage, most),
    )
    return places(index, ids)


def others(index: Index, place: SamplePlace, most: int = _MOST) -> list[SamplePlace]:
    """Returns the completions of the same row of the data at other steps, the newest first, at most
    `most`."""
    own = place.numbers
    stage = index.names["stage"].index(own.stage)
    ids = index.ids(
        "SELECT id FROM sample WHERE same = ? AND NOT (step = ? AND stage = ?) ORDER BY id DESC "
        "LIMIT ?",
        (own.same, own.step, stage, most),
    )
    return places(index, ids)


def number(value: float | None) -> float | None:
    """Returns a number of JSON, or None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")
