"""Distributes the rows of a dataset over the processes of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from policy.mesh import processes
from rl.config.data import DataOptions, NamedDataOptions
from rl.data.datasets import has_sources
from rl.data.drawing.mixture import MixturePart
from rl.data.drawing.order import RowOrder


@dataclass(frozen=True)
class Shard:
    """The rows of a dataset.

    own: the rows of this process.
    total: number of rows on all processes.
    examples: the example of each row in `own`, where the row does not hold it.
    numbers: of each row in `own`, among the rows of all processes. None: every n-th from the index
    of the process on,
        for n processes.
    effect: what happened to rows that were too long; None: there were none.
    parts: the datasets that the rows come from, one after the other; (): one dataset.
    sources: where each row of all processes came from, as in `Example.source`; None: from one
    source.
    """

    own: Sequence[Any]
    total: int
    examples: Sequence[Any] = ()
    numbers: Sequence[int] | None = None
    effect: str | None = None
    parts: Sequence[MixturePart] = ()
    sources: Sequence[str] | None = None

    def order(self, seed: int, examples: int = 1) -> RowOrder:
        """Returns the order in which a stage takes the rows. examples: that it makes of each row;
        it then takes these, numbered row by row."""
        parts = self.parts or [MixturePart("", self.total)]
        return RowOrder([replace(part, rows=part.rows * examples) for part in parts], seed)

    def numbered(self) -> dict[int, Any]:
        """Returns the rows of this process by their number among all."""
        return self._by_number

    def numbered_examples(self) -> dict[int, Any]:
        """Returns the examples of the rows of this process by the number of the row among all; {}
        where the rows hold them."""
        return replace(self, own=self.examples).numbered() if self.examples else {}

    @cached_property
    def _by_number(self) -> dict[int, Any]:
        if self.numbers is not None:
            return dict(zip(self.numbers, self.own, strict=True))
        return {processes.index() + i * processes.count(): row for i, row in enumerate(self.own)}

    def held(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the rows with these numbers that this process holds."""
        rows = self.numbered()
        return [rows[number] for number in numbers if number in rows]

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the rows with these numbers on all processes. All processes must call this with
        the same numbers."""
        own = self.numbered()
        mine = {number: own[number] for number in numbers if number in own}
        rows = {
            number: row
            for part in processes.all_gather_object(mine)
            for number, row in part.items()
        }
        return [rows[number] for number in numbers]


def joined(shards: Sequence[Shard], options: Sequence[DataOptions]) -> Shard:
    """Returns the rows of one or several datasets with these options, one dataset after the other.
    All processes call it at the same time."""
    if not any(map(has_sources, options)):
        return shards[0]
    starts = list(itertools.accumulate((shard.total for shard in shards), initial=0))
    numbered = [
        (start + number, row, example)
        for start, shard in zip(starts, shards, strict=False)
        for (number, row), example in zip(shard.numbered().items(), shard.examples, strict=True)
    ]
    numbers = [number for number, _, _ in numbered]
    own = [example.source for _, _, example in numbered]
    sources = [""] * starts[-1]
    for part in processes.all_gather_object(list(zip(numbers, own, strict=True))):
        for number, source in part:
            sources[number] = source
    return Shard(
        own=[row for _, row, _ in numbered],
        total=starts[-1],
        examples=[example for _, _, example in numbered],
        numbers=numbers,
        effect=_effects(shards, options),
        parts=[
            MixturePart(each.label, shard.total, getattr(each, "weight", None))
            for each, shard in zip(options, shards, strict=True)
            if isinstance(each, NamedDataOptions)
        ],
        sources=sources,
    )


def _effects(shards: Sequence[Shard], options: Sequence[DataOptions]) -> str | None:
    """Returns what happened to rows that were too long, by the name of their dataset."""
    texts = [
        f"of {each.label} {shard.effect}" if isinstance(each, NamedDataOptions) else shard.effect
        for each, shard in zip(options, shards, strict=True)
        if shard.effect is not None
    ]
    return "; ".join(texts) or None
