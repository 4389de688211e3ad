"""Texts that follow other texts.

Tokenizers of SentencePiece (Llama 2, Mistral, Mixtral) write a space before a text that they encode
alone, and leave out the first space of a text that they decode alone. A completion follows its
prompt, so neither must happen to it: prompt and completion together are what their tokens spell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.text.interface import Tokenizer

_PROBES = ("a", "0", ".")
_BEFORE = ("\n", "=", "a", "0")
"""Texts to encode in front of another one. A line break is a token of its own in vocabularies of
SentencePiece."""

INCOMPLETE = "\ufffd"
"""What decoders write for the first bytes of a character."""
_LONG_OPEN = 64  # bytes in a row, after which complete characters are closed
_LONGEST_OPEN = 256
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


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


class GrowingText:
    """The text of tokens that follow others and that come one after the other.

    Only the tokens whose text is open are decoded again. A token closes the text if no character is
    incomplete after it and it is no byte of its own (`<0x0A>`): a decoder reads neighbouring bytes
    at once, and writes none of them as it should where one is wrong. So the pieces add up to the
    text of all tokens, however they are divided. What stays open for long is closed too: a text of
    wrong bytes alone would be decoded again and again.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._closes = not _cleans_up(tokenizer)
        self._before: list[int] = []  # the tokens that were closed last
        self._open: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens close."""
        text = ""
        for token in tokens if self._closes else ():
            self._open.append(token)
            byte = is_byte(self._tokenizer, token)
            if byte and len(self._open) < _LONG_OPEN:
                continue
            piece = self._text()
            if not piece.endswith(INCOMPLETE) or len(self._open) >= _LONGEST_OPEN:
                text += piece
                self._before, self._open = [] if byte else self._open, []
        if not self._closes:
            self._open += tokens
        return text

    def finish(self) -> str:
        """Returns the rest of the text."""
        text = self._text() if self._open else ""
        self._before, self._open = self._open, []
        return text

    def _text(self) -> str:
        """Returns the text of the open tokens."""
        before = decode_after(self._tokenizer, self._before, self._skip)
        both = decode_after(self._tokenizer, [*self._before, *self._open], self._skip)
        return both[len(before) :]


def is_byte(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is one byte, written as `<0x0A>`."""
    name = tokenizer.convert_ids_to_tokens(token)
    return name is not None and _BYTE_TOKEN.fullmatch(name) is not None


def _cleans_up(tokenizer: Tokenizer) -> bool:
    """Whether a token may take a blank out of the text before it. transformers does that for no
    vocabulary of BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE"
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and not is_bpe


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
