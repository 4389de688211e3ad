"""Pictures and sounds in a call: rows of a table that stand in the place of token embeddings.

The host decides which token gets which row, by an index. Token ids decide nothing: a placeholder id
that the policy samples is a token like any other. Packing moves the index like tokens, chunks of a
prompt cut it, and several documents may use one row.

B rows of a call, T tokens, M rows of the table, E hidden, D layers with deepstack features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Media:
    """The pictures and sounds of a call.

    index: int32[B, T], the row of `table` that stands at each token; -1: the token's own embedding.
    table: [M, E], the output of towers.
    deep: [D, M, E], what is added to the outputs of the first D layers at such tokens; None:
    nothing.
    """

    index: Any
    table: Any
    deep: Any = None

    def text_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the tokens with 0 in the place of placeholders, whose ids may lie outside the
        vocabulary."""
        return jnp.where(self.index >= 0, 0, tokens_BT)


class MediaInputs(NamedTuple):
    """Fields of a Step; they are None in a call without pictures and sounds; policy.cache.step.Step
    explains them."""

    media: Media | None = None
    turns: Any = None
    until: Any = None


class MediaTable(NamedTuple):
    """The rows that several documents share: `rows` [M, E] and `deep` [D, M, E] or None. Documents
    are computed in one call if they have the same table object."""

    rows: Any
    deep: Any = None


@dataclass(frozen=True, eq=False)
class DocumentMedia:
    """The pictures and sounds of one document, as numpy arrays on the host. The arrays hold its
    first n tokens; the tokens after them are text.

    index: int32[n], rows of `table`, -1 at text. turns: int32[n, 3], rotary positions by time,
    height and width; None: the plain positions. until: int32[n], the number of the last token of
    each token's block; None: the decoder is causal. delta: the rotary position of token n, less n.
    """

    index: np.ndarray
    table: MediaTable
    turns: np.ndarray | None = None
    until: np.ndarray | None = None
    delta: int = 0

    def refusal(self, T: int) -> str | None:
        """Returns why these arrays do not fit a prompt of T tokens, to follow "the prompt" in a
        message; None: they do."""
        rows = len(self.table.rows)
        for name, array, shape in (
            ("index", self.index, (T,)),
            ("turns", self.turns, (T, 3)),
            ("until", self.until, (T,)),
        ):
            if array is not None and np.shape(array) != shape:
                return (
                    f"has media whose {name} has shape {list(np.shape(array))}; its {T} tokens "
                    f"need {list(shape)}"
                )
        if np.max(self.index, initial=-1) >= rows or np.min(self.index, initial=0) < -1:
            return f"has a media index outside -1..{rows - 1}, the rows of its table"
        if T and self.index[-1] >= 0:
            return (
                "ends with a picture or sound; put a token after it, since decoding feeds the "
                "last token as text"
            )
        if self.until is not None and (
            np.any(self.until < np.arange(T))
            or np.any(self.until >= T)
            or np.any(self.until[np.minimum(self.until, T - 1)] != self.until)
        ):
            return "has media whose until does not name the last token of each block"
        if self.until is not None and T > 1 and self.until[-2] == T - 1:
            return (
                "ends with a block of a picture; put a token after it, since decoding feeds "
                "the last token alone"
            )
        return None

    @property
    def longest_block(self) -> int:
        """Returns the number of tokens of the longest block; 1 where the decoder is causal."""
        return (
            1
            if self.until is None
            else int(np.max(np.unique(self.until, return_counts=True)[1], initial=1))
        )

    def call_end(self, end: int) -> int:
        """Returns the last place, `end` or earlier, where a call may end: a block is computed in
        one call."""
        if self.until is None or end >= len(self.until):
            return end
        return int(
            np.searchsorted(self.until[:end], end)
        )  # the first token whose block reaches past `end`

    def span(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Returns (index, turns, until) of the tokens start .. end - 1."""
        places = np.arange(start, end, dtype=np.int32)
        n = len(self.index)
        text = places[places >= n]
        index = np.concatenate([self.index[start:end], np.full(len(text), -1, np.int32)])
        turns = (
            None
            if self.turns is None
            else np.concatenate([self.turns[start:end], _turns(text + self.delta)])
        )
        until = None if self.until is None else np.concatenate([self.until[start:end], text])
        return index, turns, until


def _turns(positions_T: np.ndarray) -> np.ndarray:
    """Returns the rotary positions of text, int32[T, 3]."""
    return np.repeat(positions_T[:, None], 3, axis=1)


def media_inputs(
    documents: Sequence[DocumentMedia], starts: Sequence[int], shape: tuple[int, int]
) -> MediaInputs:
    """Returns the inputs of a call of `shape` [B, T] whose row b holds the tokens of document b
    from starts[b] on. All documents have one table and the same kinds of arrays; rows past the
    documents are padding."""
    B, T = shape
    table = documents[0].table
    first = documents[0]
    index = np.full(shape, -1, np.int32)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), shape)
    turns = None if first.turns is None else np.zeros((B, T, 3), np.int32)
    until = None if first.until is None else places.copy()
    for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
        spans = document.span(start, start + T)
        for array, values in zip((index, turns, until), spans, strict=True):
            if array is not None:
                assert values is not None, "documents of one call have the same kinds of arrays"
                array[row] = values
    return MediaInputs(Media(index, table.rows, table.deep), turns, until)
