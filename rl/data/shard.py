"""Distributes the rows of a dataset over the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from policy.mesh import processes


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
    """

    own: Sequence[Any]
    total: int
    examples: Sequence[Any] = ()
    numbers: Sequence[int] | None = None
    effect: str | None = None

    def numbered(self) -> dict[int, Any]:
        """Returns the rows of this process by their number among all."""
        return self._by_number

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
