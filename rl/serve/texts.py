"""The text of a completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.text.interface import Tokenizer
from rollout.text.spelling import INCOMPLETE, GrowingText
from rollout.types import SamplingParams


class TextStream:
    """Turns the tokens of one completion into the text that can no longer change.

    The text ends before the stop string that ended the completion. Held back are a character whose
    bytes are not complete, and the end of the text if a stop string may begin there. However the
    tokens are divided, the pieces of text add up to the same.

    stopped_by: the stop string that ended the text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, special: bool = False):
        """special: special tokens are a part of the text, except the one that ends it."""
        self._params = params
        self._decoder = GrowingText(tokenizer, skip_special_tokens=not special)
        self._first = _FirstCharacters(tokenizer, params.min_tokens, special=special)
        self._shown = 0
        self._rest = ""
        self._pieces: list[str] = []
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Returns all that `add` has returned."""
        return "".join(self._pieces)

    def add(self, tokens: Sequence[int], *, ended: bool) -> str:
        """Returns the text that these tokens verify. ended: the completion has no more."""
        if ended and tokens and tokens[-1] in self._params.stop_token_ids:
            tokens = tokens[:-1]
        self._first.add(tokens)
        self._rest += self._decoder.add(tokens)
        if ended:
            self._rest += self._decoder.finish()
        new = self._cut(self._rest)
        if not ended:
            new = new[: len(new) - self._held(new)]
        self._rest = self._rest[len(new) :]
        self._shown += len(new)
        self._pieces.append(new)
        return new

    def _cut(self, text: str) -> str:
        """Returns the part of a text, the characters after those that are shown, before the first
        stop string that does not lie in the first `min_tokens`."""
        stops = self._params.stop
        if not stops or (skipped := self._first.characters) is None:
            return text
        least = skipped + 1 - self._shown
        places = [(text.find(stop, max(0, least - len(stop))), stop) for stop in stops]
        hits = [(place, stop) for place, stop in places if place >= 0]
        if not hits:
            return text
        place, self.stopped_by = min(hits)
        return text[:place]

    def _held(self, text: str) -> int:
        """Returns how many of the last characters may be the beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self._params.stop), default=0)


class _FirstCharacters:
    """How many characters the first tokens of a completion have, in which no stop string counts.

    characters: None while there are no more tokens than these.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, *, special: bool):
        """count: how many tokens."""
        self._decoder = GrowingText(tokenizer, skip_special_tokens=not special)
        self._left = count
        self._text = 0
        self.characters: int | None = None if count else 0

    def add(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens."""
        if self.characters is not None or not tokens:
            return
        self._text += len(self._decoder.add(tokens[: self._left]))
        if len(tokens) > self._left:
            self._text += len(self._decoder.finish().rstrip(INCOMPLETE))
            self.characters = self._text
        self._left = max(0, self._left - len(tokens))


def _overlap(text: str, stop: str) -> int:
    """Returns how many of the last characters of a text begin a stop string, but not all of it."""
    end = text[len(text) - min(len(text), len(stop) - 1) :]
    place = next((place for place in range(len(end)) if stop.startswith(end[place:])), len(end))
    return len(end) - place
