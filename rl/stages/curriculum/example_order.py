"""The order in which a stage takes the examples of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl.data.drawing.order import RowOrder
    from rl.data.shard import Shard


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
        order = self._of_all if self.chosen is None else self.chosen
        return order.take(numbers)

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
        if self.chosen is not None or len(self.rows.parts) < 2:
            return {}
        epochs = self._of_all.epochs(drawn)
        return {f"source/{name}/epoch": value for name, value in epochs.items()}

    @property
    def _of_all(self) -> RowOrder:
        """The order without a curriculum."""
        return self.rows.order(self.seed, self.examples // self.rows.total)
