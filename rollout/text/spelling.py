"""Texts that follow other texts.

Tokenizers of SentencePiece (Llama 2, Mistral, Mixtral) write a space before a text that they encode
alone, and leave out the first space of a text that they decode alone. A completion follows its
prompt, so neither must happen to it: prompt and completion together are what their tokens spell.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.text.interface import Tokenizer

_PROBES = ("a", "0", ".")
_BEFORE = ("\n", "=", "a", "0")
"""Texts to encode in front of another one. A line break is a token of its own in vocabularies of
SentencePiece."""


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text that follows another text, without special tokens."""
    alone = list(tokenizer.encode(text, add_special_tokens=False))
    if not text or not _habits(tokenizer).writes_space:
        return alone
    for before in _BEFORE:
        head, both = (
            list(tokenizer.encode(each, add_special_tokens=False))
            for each in (before, before + text)
        )
        ids = both[len(head) :]
        is_cut = both[: len(head)] == head  # no token has a part of both texts
        if is_cut and decode_after(tokenizer, ids) == text:
            return ids
    return alone


def decode_after(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Returns the text of tokens that follow others."""
    anchor = _habits(tokenizer).anchor
    if not anchor:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    before = tokenizer.decode(anchor, skip_special_tokens=skip_special_tokens)
    text = tokenizer.decode([*anchor, *ids], skip_special_tokens=skip_special_tokens)
    return text.removeprefix(before)


@dataclass(frozen=True)
class _Habits:
    """writes_space: a text that is encoded alone gets a space in front. anchor: tokens to decode in
    front of others, so that these keep their first space; empty: they keep it anyway."""

    writes_space: bool
    anchor: tuple[int, ...]


@functools.lru_cache(maxsize=8)
def _habits(tokenizer: Tokenizer) -> _Habits:
    """Encodes a letter and decodes it once and twice."""
    for probe in _PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False)
        once, twice = (tokenizer.decode(ids * count, skip_special_tokens=False) for count in (1, 2))
        if not ids or tokenizer.unk_token_id in ids:
            continue
        return _Habits(
            writes_space=twice != 2 * probe, anchor=tuple(ids) if twice != 2 * once else ()
        )
    return _Habits(writes_space=False, anchor=())
