"""Pictures and sounds in a call: rows of a table that stand in the place of token embeddings.

The host decides which token gets which row, by an index. Token ids decide nothing: a placeholder id
that the policy samples is a token like any other. Packing moves the index like tokens, chunks of a
prompt cut it, and several prompts may use one row.

B rows of a call, T tokens, E hidden; I rows of the table of items, L layers with deepstack
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MediaTable(NamedTuple):
    """The rows that several sequences share: `rows` [I, E] and `deep` [L, I, E] or None."""

    rows: Any
    deep: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Media:
    """The pictures and sounds of the tokens of a call or a batch, [B, T], or of a prompt, [n] on
    the host. The arrays of a prompt hold its first n tokens; the tokens after them are text.

    index: int32[B, T], the row of `table` that stands at each token; -1: the token's own embedding.
    None: no token has a row.
    table: [I, E], the output of towers; None: the caller of a program adds it (`in_table`). Prompts
    are computed in one call if they have the same array.
    deep: [L, I, E], what is added to the outputs of the first L layers at such tokens; None:
    nothing.
    turns: int32[B, T, 3], rotary positions by time, height and width; None: the plain positions.
    until: int32[B, T], the position of the last token of each token's block; None: the decoder is
    causal.
    """

    index: Any = None
    table: Any = None
    deep: Any = None
    turns: Any = None
    until: Any = None

    def in_table(self, table: MediaTable) -> Media:
        """Returns the same with the rows of this table."""
        return replace(self, table=table.rows, deep=table.deep)

    def text_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the tokens with 0 in the place of placeholders, whose ids may lie outside the
        vocabulary."""
        return tokens_BT if self.index is None else jnp.where(self.index >= 0, 0, tokens_BT)

    @cached_property
    def delta(self) -> int:
        """Returns the rotary position of the token after a prompt, less its position."""
        if self.turns is None or not len(self.turns):
            return 0
        return int(np.max(self.turns)) + 1 - len(self.turns)

    def refusal(self, T: int) -> str | None:
        """Returns why the arrays of a prompt do not fit its T tokens, to follow "the prompt" in a
        message; None: they do."""
        rows = len(self.table)
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
        """Returns the number of tokens of the longest block of a prompt; 1 where the decoder is
        causal."""
        if self.until is None:
            return 1
        _, lengths = np.unique(self.until, return_counts=True)
        return int(np.max(lengths, initial=1))

    def call_end(self, end: int) -> int:
        """Returns the last place of a prompt, `end` or earlier, where a call may end: a block is
        computed in one call."""
        if self.until is None or end >= len(self.until):
            return end
        # The first token whose block reaches past `end`.
        return int(np.searchsorted(self.until[:end], end))

    def put(self, part: Media, row: int, columns: slice) -> None:
        """Writes the arrays of a part of a prompt, as many as `columns`, into a row of these
        arrays on the host. Both have the same kinds of arrays."""
        for name in ("index", "turns", "until"):
            if (array := getattr(self, name)) is not None:
                array[row, columns] = getattr(part, name)

    def part(self, start: int, end: int) -> Media:
        """Returns those of the tokens start .. end - 1 of a prompt and its completion."""
        places = np.arange(start, end, dtype=np.int32)
        text = places[places >= len(self.index)]
        after = {
            "index": np.full(len(text), -1, np.int32),
            "turns": np.repeat((text + self.delta)[:, None], 3, axis=1),
            "until": text,
        }
        arrays = {name: getattr(self, name) for name in after}
        return replace(
            self,
            **{
                name: np.concatenate([array[start:end], after[name]])
                for name, array in arrays.items()
                if array is not None
            },
        )


def of_call(prompts: Sequence[Media], starts: Sequence[int], shape: tuple[int, int]) -> Media:
    """Returns the pictures and sounds of a call of `shape` [B, T] whose row b holds the tokens of
    prompt b from starts[b] on. All prompts have one table and the same kinds of arrays; rows past
    the prompts are padding."""
    B, T = shape
    places = np.broadcast_to(np.arange(T, dtype=np.int32), shape)
    first = prompts[0]
    call = replace(
        first,
        index=np.full(shape, -1, np.int32),
        turns=None if first.turns is None else np.zeros((B, T, 3), np.int32),
        until=None if first.until is None else places.copy(),
    )
    for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        call.put(prompt.part(start, start + T), row, slice(0, T))
    return call
