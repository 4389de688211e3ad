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

    rows: the rows of its data. examples: number of examples; each row makes equally many, with
    consecutive indices. seed: seed of the order. chosen: order of the rows that a curriculum
    chooses from; None: all rows.
    """

    rows: Shard
    examples: int
    seed: int
    chosen: RowOrder | None = None

    def take(self, numbers: range) -> list[int]:
        """Returns the indices in the data of the examples at these places of the order, which are
        counted from 0.

        Without a curriculum a stage takes its examples in this order. A curriculum may take others.
        """
        order = self._of_all if self.chosen is None else self.chosen
        return order.take(numbers)

    def rows_of(self, examples: Sequence[int]) -> list[int]:
        """Returns the row of the data that makes each of these examples."""
        return [number // self._examples_per_row for number in examples]

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
        return self.rows.order(self.seed, self._examples_per_row)

    @property
    def _examples_per_row(self) -> int:
        return self.examples // self.rows.total
