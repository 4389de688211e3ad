"""Log-probabilities of tokens, in the two forms of OpenAI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollout.text.interface import Tokenizer
from rollout.types import TokenScores


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


class TokenSpelling:
    """The bytes of each token of a vocabulary, also of a token that is a part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._known: dict[int, bytes] = {}

    def bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; none for an id that the tokenizer does not have."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """Returns the text of a token. Bytes that are no characters are written as OpenAI writes
        them: `bytes:\\xe2\\x82`."""
        spelled = self.bytes(token)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _read(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._added:
            return str(self._added[token].content).encode("utf-8", "replace")
        if self._byte_level:
            letters = _byte_of_letter()
            if all(letter in letters for letter in name):
                return bytes(letters[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode("utf-8", "replace")


def chat_logprobs(
    spelling: TokenSpelling, tokens: Sequence[int], scores: TokenScores
) -> dict[str, Any]:
    """Returns the log-probabilities of the tokens of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        shown = {"token": spelling.text(token), "logprob": _finite(logprob)}
        return {**shown, "bytes": list(spelling.bytes(token))}

    content = []
    for number, token in enumerate(tokens):
        ids = scores.top_ids[number].tolist()
        tops = zip(ids, scores.top_logprobs[number].tolist(), strict=True)
        chosen = entry(token, float(scores.logprobs[number]))
        content.append(chosen | {"top_logprobs": [entry(*each) for each in tops]})
    return {"content": content, "refusal": None}


@dataclass
class LegacyLogprobs:
    """The log-probabilities of a text of `/v1/completions`, token by token.

    The likeliest tokens are a dict by text. Where two tokens have the same text, the likelier one
    has it as its key, and the other has `token_id:ID`. The token that was drawn is always there.
    """

    spelling: TokenSpelling
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], scores: TokenScores) -> None:
        """Adds tokens."""
        for number, token in enumerate(tokens):
            text = self.spelling.text(token)
            logprob = float(scores.logprobs[number])
            self.tokens.append(text)
            self.text_offset.append(self.offset)
            self.offset += len(text)
            if math.isnan(logprob):  # nothing predicts the first token of a prompt
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
                continue
            self.token_logprobs.append(_finite(logprob))
            ids = scores.top_ids[number].tolist()
            tops = dict(zip(ids, scores.top_logprobs[number].tolist(), strict=True))
            self.top_logprobs.append(self._named(tops | {token: logprob}))

    def _named(self, tops: dict[int, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, logprob in sorted(tops.items(), key=lambda each: (-each[1], each[0])):
            text = self.spelling.text(token)
            named[text if text not in named else f"token_id:{token}"] = _finite(logprob)
        return named

    def take(self) -> dict[str, Any]:
        """Returns what was added since the last call."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        return taken


def _finite(logprob: float) -> float:
    """Returns a number that JSON can hold: -9999.0 in place of minus infinity, as OpenAI has it."""
    return logprob if math.isfinite(logprob) else -9999.0
