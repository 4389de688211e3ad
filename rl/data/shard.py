"""Distributes the rows of a dataset over the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policy.mesh import processes


@dataclass(frozen=True)
class Shard:
    """The rows of a dataset.

    own: the rows of this process: every n-th row from its index on, for n processes.
    total: number of rows on all processes.
    examples: the example of each row in `own`, where the row does not hold it.
    """

    own: Sequence[Any]
    total: int
    examples: Sequence[Any] = ()

    def numbered(self) -> dict[int, Any]:
        """Returns the rows of this process by their number among all."""
        return {processes.index() + i * processes.count(): row for i, row in enumerate(self.own)}

    def held(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the rows with these numbers that this process holds."""
        index, count = processes.index(), processes.count()
        return [self.own[number // count] for number in numbers if number % count == index]

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the rows with these numbers on all processes. All processes must call this with the same numbers."""
        index, count = processes.index(), processes.count()
        mine = {number: self.own[number // count] for number in numbers if number % count == index}
        rows = {number: row for part in processes.all_gather_object(mine) for number, row in part.items()}
        return [rows[number] for number in numbers]
