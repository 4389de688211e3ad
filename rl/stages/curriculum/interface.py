"""The interface of a curriculum: it is asked for the rows of each step, and observes their rewards.

R rows, G completions of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.data.drawing.order import RowOrder
from rl.data.encoded import Example

if TYPE_CHECKING:
    from rl.data.shard import Shard


class Candidates:
    """The rows of a stage. They have numbers from 0 on, those of the first dataset first.

    total: how many there are, on all processes. seed: of the draws of the stage.
    """

    def __init__(self, shard: Shard, seed: int):
        self.total = shard.total
        self.seed = seed
        self._shard = shard

    def values(self, function: Callable[[Example], Any]) -> list[Any]:
        """Returns function(example) of each row. In a run of several processes all of them call it,
        and get the values of all rows."""
        from policy.mesh import processes  # imports jax

        examples = self._shard.numbered_examples()
        own = {number: function(example) for number, example in examples.items()}
        values: list[Any] = [None] * self.total
        for part in processes.all_gather_object(own):
            for number, value in part.items():
                values[number] = value
        return values

    def column(self, name: str) -> list[Any]:
        """Returns the value of a column of each row; None where a row lacks it."""
        return self.values(lambda example: example.columns.get(name))

    def among(self, rows: Sequence[int] | None = None) -> RowOrder:
        """Returns the order in which a stage takes these rows (None: all) without a curriculum.

        Each dataset keeps its weight; one without a weight has as much as it has rows left.
        """
        order = self._shard.order(self.seed)
        return order if rows is None else order.among(rows)


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram: how many rows a curriculum draws from, and how many it leaves out."""

    label: str
    drawn: int
    left_out: int


@dataclass(frozen=True)
class Histogram:
    """What the report shows of a curriculum."""

    title: str
    bars: Sequence[Bar]


class Curriculum:
    """Chooses the rows of the steps of a stage.

    A configuration names a function, which takes the `Candidates` and options and returns one. What
    it chooses depends on these, its state and the calls before alone: never on the clock, a global
    random generator or the process. All processes of a run have one each, with the same calls.
    """

    rows: Sequence[int] | None = None
    """The rows that it chooses from; None: all. A pass over the data (an epoch) has these."""
    note: str | None = None
    """A line about it, at the start of the run."""

    def next(self, count: int) -> Sequence[int]:
        """Returns the next `count` rows. A row may come again at any time."""
        raise NotImplementedError

    def observe(self, rows: Sequence[int], rewards_RG: np.ndarray) -> None:
        """Takes the rewards of the completions of these rows, which were chosen together: float64,
        NaN without a score. Each call of `next` in a stage that samples is followed by this call
        before the next one, also for groups that dynamic sampling leaves out."""

    def state(self) -> dict[str, Any]:
        """Returns what later calls depend on, as values that JSON can hold. Checkpoints have it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; {} at the start of the stage.

        It is called once, before `next`; in a run that goes on before the model is built. May raise
        DataError for a state that does not fit the rows.
        """

    def histogram(self) -> Histogram | None:
        """Returns what the report shows; None: nothing."""
        return None
