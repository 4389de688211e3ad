"""Turns the tokens of a sample into texts and numbers, with the tokenizer of the run."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from policy.json_types import JsonValue
from rl.data.hub import cached_snapshots, hub_name
from rl.records.run_files import read_config
from rl.records.samples import CLIPPED_HIGH, CLIPPED_LOW, DROPPED, STOP, TRAINED

if TYPE_CHECKING:
    from rollout.text.interface import Tokenizer
    from rollout.text.media_tokens import MediaTokens

FLAGS = {
    TRAINED: "trained",
    STOP: "stop",
    CLIPPED_LOW: "clipped low",
    CLIPPED_HIGH: "clipped high",
    DROPPED: "dropped",
}
_REPLACEMENT = "\ufffd"


class TokenIds(TypedDict):
    """The tokens of a sample for a page. text: of each, or None without a tokenizer."""

    id: list[int]
    text: NotRequired[list[str] | None]


class TokenColumns(TokenIds):
    """The recorded numbers of the tokens of a sample, one entry each."""

    logp: list[float | None]
    gap: list[float | None]
    entropy: list[float | None]
    advantage: list[float | None]
    flags: list[int]
    turn: list[int]


class TokenTexts:
    """Texts of token ids. The tokenizer is loaded at the first use, since transformers is slow to
    import."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._tokenizer = None
        self._loaded = False
        self._lock = threading.Lock()
        self.source = ""

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """Returns the text of each token, those of a character in several tokens with its last one;
        None: no tokenizer.

        Joined, they are the text of all tokens, special ones included.
        """
        with self._lock:
            if not self._loaded:
                self._tokenizer = self._load()
                self._loaded = True
            if self._tokenizer is None:
                return None
            return _pieces(self._tokenizer, [int(each) for each in ids])

    def _load(self) -> Tokenizer | None:
        from rollout.text.tokenizer import load_tokenizer

        for source, *more in self._sources():
            try:
                tokenizer = load_tokenizer(source, *more)
            # no tokenizer there, a damaged one, or one that needs a package that is not installed
            except Exception:
                continue
            self.source = str(source)
            return tokenizer
        return None

    def _sources(self) -> list[tuple[Any, ...]]:
        """Lists what may be the tokenizer: the exported one, that of config.yml, that of the
        model."""
        result: list[tuple[Any, ...]] = [(self._directory / "export",)]
        config = read_config(self._directory, [])
        named = config.get("tokenizer")
        model = config.get("model")
        source = model.get("source") if isinstance(model, dict) else None
        if isinstance(named, dict) and isinstance(named.get("source"), str):
            media = _media_tokens(source) if named["source"] in ("bytes", "characters") else None
            result += [
                (each, named.get("alphabet"), None, media) for each in _places(named["source"])
            ]
        if isinstance(source, str):
            result += [(each,) for each in _places(source)]
        return result


def numbers(tokens: np.ndarray) -> TokenColumns:
    """Returns the columns of TOKEN[n] as lists of JSON; None where there is no number."""
    return {
        "id": tokens["id"].tolist(),
        "logp": _reals(tokens["logp"]),
        "gap": _reals(tokens["gap"]),
        "entropy": _reals(tokens["entropy"]),
        "advantage": _reals(tokens["advantage"]),
        "flags": tokens["flags"].tolist(),
        "turn": tokens["turn"].tolist(),
    }


def _reals(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.5g}") if math.isfinite(x) else None for x in values.astype(float).tolist()]


def flag_text(flags: int) -> str:
    """Returns the names of the flags of a token."""
    return ", ".join(name for bit, name in FLAGS.items() if flags & bit)


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decodes token by token: the text of the last tokens with each, less the text without it."""
    pieces = []
    start = 0
    shown = ""
    for end in range(1, len(ids) + 1):
        text = _decoded(tokenizer, ids[start:end])
        if text.endswith(_REPLACEMENT) and end < len(ids) and end - start < 8:
            pieces.append("")  # a part of a character, which the next tokens complete
            continue
        pieces.append(text[len(shown) :] if text.startswith(shown) else text)
        # One token of context: some tokenizers drop the space at the beginning of a text.
        start = end - 1
        shown = _decoded(tokenizer, ids[start:end])
    return pieces


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _media_tokens(source: JsonValue) -> MediaTokens | None:
    """Returns the special tokens that a built-in tokenizer has for a model with towers, without a
    download."""
    if not isinstance(source, str) or hub_name(source) is not None:
        return None
    from rl.config.model import ModelOptions
    from rl.data.towers import media_tokens

    try:
        return media_tokens(ModelOptions(source=source))
    except ValueError:  # files of the model that are damaged by now
        return None


def _places(source: str) -> list[str | Path]:
    """Lists a directory, or the folders of a name on the hub in the local cache. Downloads
    nothing."""
    repository = hub_name(source)
    return [source] if repository is None else [*cached_snapshots(repository)]
