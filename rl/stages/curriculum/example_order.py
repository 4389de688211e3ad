"""The order in which a stage takes the examples of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl.data import datasets
from rl.data.drawing.mixture import Mixture

if TYPE_CHECKING:
    from rl.data.shard import Shard
    from rl.stages.curriculum.interface import RowOrder


@dataclass(frozen=True)
class ExampleOrder:
    """A shuffled order of the examples of a stage, pass after pass.

    rows: of its data. examples: how many they make, equally many each. seed: of the order. chosen:
    the order of the rows that a curriculum chooses from, in the place of all; None: there is none.
    """

    rows: Shard
    examples: int
    seed: int
    chosen: RowOrder | None = None

    def take(self, numbers: range) -> list[int]:
        """Returns the indices in the data of the examples that stand at these numbers, 0, 1, 2, ...,
        of the order: those that the stage takes one after the other.

        With a curriculum, which of them a step takes is up to the curriculum.
        """
        if self.chosen is not None:
            return self.chosen.take(numbers)
        if (mixture := self._mixture) is not None:
            return mixture.order(self.seed, numbers)
        return [datasets.order(self.seed, self.examples, number) for number in numbers]

    def rows_of(self, examples: Sequence[int]) -> list[int]:
        """Returns the row of the data that each of these examples is of."""
        return [number * self.rows.total // self.examples for number in examples]

    def sources_of(self, examples: Sequence[int]) -> list[str]:
        """Returns where each of these examples came from, in data with sources."""
        sources = self.rows.sources
        assert sources is not None
        return [sources[row] for row in self.rows_of(examples)]

    def epochs(self, drawn: int) -> dict[str, float]:
        """Returns source/NAME/epoch after so many examples, of each of several datasets."""
        mixture = None if self.chosen is not None else self._mixture
        if mixture is None:
            return {}
        return {f"source/{name}/epoch": value for name, value in mixture.epochs(drawn).items()}

    @property
    def _mixture(self) -> Mixture | None:
        """The order of the examples of several datasets; None for one dataset."""
        parts = self.rows.parts
        if len(parts) < 2:
            return None
        per_row = self.examples // self.rows.total
        return Mixture([replace(part, rows=part.rows * per_row) for part in parts])
