"""What a row may be: how long, and of which tokens. Longer rows are refused, left out or cut, as
`too_long` of the data says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from rl.config.data import DataOptions, datasets_of
from rl.config.run import RunConfig
from rl.data.encoded import Pair, Row
from rl.errors import Fault
from rollout.text.interface import Tokenizer

T = TypeVar("T")
FIT = 0.99
"""Share of the rows for which a refusal names the length."""


@dataclass(frozen=True)
class Limit:
    """How long a row may be, and what happens to a longer one.

    max_length: of the run. new_tokens: those that a completion may add to a prompt; 0 for rows with
    an answer. key: the key of `too_long`; None: such rows are refused without a choice.
    """

    max_length: int
    new_tokens: int = 0
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    key: str | None = None

    @property
    def tokens(self) -> int:
        """Returns the most tokens of a row."""
        return self.max_length - self.new_tokens

    def fault(self, lengths: Sequence[int], places: Sequence[str]) -> Fault | None:
        """Returns why rows of these lengths, at these places, are refused; None: all fit, or none
        is refused."""
        long = [number for number, length in enumerate(lengths) if length > self.tokens]
        if not long or self.too_long != "refuse":
            return None
        longest = max(long, key=lambda number: lengths[number])
        room = (
            f" ({self.max_length} - {self.new_tokens} for the completion)"
            if self.new_tokens
            else ""
        )
        text = (
            f"{len(long)} of {len(lengths)} rows are longer than the {self.tokens} tokens that "
            f"fit{room}: first {places[long[0]]} with {lengths[long[0]]} tokens"
        )
        if longest != long[0]:
            text = f"{text}; the longest, {places[longest]}, has {lengths[longest]}"
        most = int(np.quantile(lengths, FIT, method="higher")) + self.new_tokens
        change = f"max_length={lengths[longest] + self.new_tokens} fits all rows"
        if most < lengths[longest] + self.new_tokens:
            change = (
                f"max_length={most} fits {FIT:.0%} of them, {change.replace('rows', 'of them')}"
            )
        if self.key is not None:
            change = f"{change}; {self.key}=drop leaves the long ones out"
            change = change if self.new_tokens else f"{change}, {self.key}=truncate cuts their ends"
        return Fault(text, change)

    def nothing_left(self, effect: str | None) -> str:
        """Returns the refusal of data of which no row fits."""
        return f"no row is left: {effect}. Raise max_length ({self.max_length})"

    def effect(self, left_out: int, cut: int, total: int) -> str | None:
        """Returns what happened to the long rows of `total` rows; None: there were none."""
        parts = [f"{left_out} are left out"] * (left_out > 0) + [f"{cut} are cut"] * (cut > 0)
        if not parts:
            return None
        why = f"longer than the {self.tokens} tokens that fit ({self.key}: {self.too_long})"
        return f"{left_out + cut} of {total} rows are {why}: {' and '.join(parts)}"


def too_long_key(config: RunConfig, source: DataOptions) -> str:
    """Returns the dotted key of `too_long` for a section of data of the run: this object, not one
    that is equal."""
    sections: dict[str, Any] = {"data": config.data}
    for number, stage in enumerate(config.stages):
        sections[f"stages.{number}.data"] = stage.data
        sections[f"stages.{number}.held_out.data"] = stage.held_out and stage.held_out.data
    for key, section in sections.items():
        for index, each in enumerate(datasets_of(section)):
            if each is source:
                return f"{key}.too_long" if each is section else f"{key}.{index}.too_long"
    return "data.too_long"


def outside_vocabulary(tokenizer: Tokenizer, token: int, where: str, size: int) -> Fault:
    """Returns why a row at a place with this token is refused by a model with `size` tokens."""
    text = tokenizer.convert_ids_to_tokens(token)
    return Fault(
        f"{where}: token {token} ({text!r}) is outside the model's vocabulary of {size}",
        "Use the model's own tokenizer or leave the row out (random weights: set "
        "model.overrides.vocab_size)",
    )


@dataclass(frozen=True)
class Fitting(Generic[T]):
    """The rows that fit. numbers: of each among all rows. cut: how many of them have lost their
    end."""

    rows: list[T]
    numbers: list[int]
    cut: int


def fit(
    rows: Sequence[T], limit: Limit, length: Callable[[T], int], cut: Callable[[T, int], T | None]
) -> Fitting[T]:
    """Leaves out or cuts the rows that are too long.

    cut: returns the first tokens of a row, None if nothing is left to learn from; such a row is
    left out.
    """
    kept: list[T] = []
    numbers: list[int] = []
    changed = 0
    for number, row in enumerate(rows):
        fitting: T | None = row
        if length(row) > limit.tokens:
            fitting = cut(row, limit.tokens) if limit.too_long == "truncate" else None
            changed += fitting is not None
        if fitting is not None:
            kept.append(fitting)
            numbers.append(number)
    return Fitting(kept, numbers, changed)


def never_cut(row: T, end: int) -> T | None:
    """Cuts nothing: prompts are left out."""
    return None


def cut_row(row: Row, end: int) -> Row | None:
    """Returns the first `end` tokens of a row, fewer where that would cut a picture or a sound;
    None if none of them is trained on."""
    if row.expanded is not None:
        end = row.expanded.end_before(end)
    if 1 not in row.mask[:end]:
        return None
    return Row(row.ids[:end], row.mask[:end], row.expanded and row.expanded.first(end))


def cut_pair(pair: Pair, end: int) -> Pair | None:
    """Returns a pair with both answers cut at `end` tokens; None if one has no token left, or both
    are equal."""
    chosen, rejected = (cut_row(row, end) for row in (pair.chosen, pair.rejected))
    if chosen is None or rejected is None or chosen.ids == rejected.ids:
        return None
    return Pair(chosen, rejected, pair.margin)
