"""The rows of a dataset, spread over the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policy.mesh import processes


@dataclass(frozen=True)
class Shard:
    """`own`: the rows that this process holds, every n-th of n processes from its number on; `total`: how many there are in all."""

    own: Sequence[Any]
    total: int

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """The rows of these numbers, which all processes ask for at once: who holds one tells the others."""
        index, count = processes.index(), processes.count()
        mine = {number: self.own[number // count] for number in numbers if number % count == index}
        found = {number: row for part in processes.all_gather_object(mine) for number, row in part.items()}
        return [found[number] for number in numbers]
