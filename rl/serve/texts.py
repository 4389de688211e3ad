"""The text of a completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.text.interface import Tokenizer
from rollout.text.spelling import decode_after
from rollout.types import SamplingParams

_INCOMPLETE = "\ufffd"  # what decoders write for the first bytes of a character


class TextStream:
    """Turns the tokens of one completion into the text that can no longer change.

    The text ends before the stop string that ended the completion. Held back are a character whose
    bytes are not complete, and the end of the text if a stop string may begin there. However the
    tokens are divided, the pieces of text add up to the same.

    stopped_by: the stop string that ended the text. text: all that `add` has returned.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, special: bool = False):
        """special: special tokens are a part of the text, except the one that ends it."""
        self._tokenizer = tokenizer
        self._params = params
        self._special = special
        self._tokens: list[int] = []
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, tokens: Sequence[int], *, ended: bool) -> str:
        """Returns the text that these tokens verify. ended: the completion has no more."""
        self._tokens += tokens
        shown = self._tokens
        if ended and shown and shown[-1] in self._params.stop_token_ids:
            shown = shown[:-1]
        text = self._cut(self._decode(shown))
        if not ended:
            text = text.rstrip(_INCOMPLETE)
            text = text[: len(text) - self._held(text)]
        new = text[len(self.text) :]
        self.text += new
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode_after(self._tokenizer, tokens, skip_special_tokens=not self._special)

    def _cut(self, text: str) -> str:
        """Returns the text before the first stop string that does not lie in the first
        `min_tokens`."""
        stops = self._params.stop
        if not stops:
            return text
        least = self._params.min_tokens
        skipped = len(self._decode(self._tokens[:least]).rstrip(_INCOMPLETE)) if least else 0
        shown = len(self.text)  # what is held back begins there, and no stop string before
        places = [(text.find(stop, max(shown, skipped + 1 - len(stop))), stop) for stop in stops]
        hits = [(place, stop) for place, stop in places if place >= 0]
        if not hits:
            return text
        place, self.stopped_by = min(hits)
        return text[:place]

    def _held(self, text: str) -> int:
        """Returns how many of the last characters may be the beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self._params.stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Returns how many of the last characters of a text begin a stop string, but not all of it."""
    end = text[len(text) - min(len(text), len(stop) - 1) :]
    place = next((place for place in range(len(end)) if stop.startswith(end[place:])), len(end))
    return len(end) - place
