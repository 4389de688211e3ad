"""A stage with the rows of its data, and the order in which steps take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

from rl.config.data import datasets_of
from rl.stages.configured import ConfiguredStage
from rl.stages.curriculum import named
from rl.stages.curriculum.example_order import ExampleOrder
from rl.stages.curriculum.interface import Candidates, Curriculum
from rl.stages.sampling import by_source

if TYPE_CHECKING:
    from rl.config.data import DataOptions
    from rl.config.run import RunConfig
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.stages.context import Context


class StageWithRows(ConfiguredStage, ABC):
    """A stage with the rows of its data. `prepare` reads them, and steps draw them."""

    rows: Shard
    """The rows of its data."""
    held_out_rows: Shard | None = None
    """The rows of `held_out`, on which the loss of the stage is measured."""
    curriculum: Curriculum | None = None
    """What chooses the rows of each step; None: all of them, in shuffled order."""
    is_over: bool = False
    """Whether the run goes on after the last step of the stage, which then takes no more rows.
    `stages_of_run` (rl/run/resume/continued.py) sets it, from the checkpoints of the run."""
    context: Context
    """What the stages of the run share, from the start of the stage on."""

    def __init__(self, config: RunConfig, index: int):
        super().__init__(config, index)
        # Indices in the data of the examples of the current step.
        self.example_numbers: list[int] = []

    @abstractmethod
    def prepare(self, reader: DataReader) -> None:
        """Reads the rows of the stage. Raises ConfigError or DataError."""

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        """Reads the rows of a dataset in the form of this stage. held_out: they are not trained
        on."""
        raise NotImplementedError(f"{self.name} has no rows with answers")

    def read_rows(self, reader: DataReader) -> None:
        """Reads the rows of the stage, and those that its loss is measured on."""
        from rl.data.shard import joined  # imports jax

        self.rows = joined([self.read(reader, each) for each in self.datasets], self.datasets)
        options = self.options.curriculum
        if options is not None and not (self.is_over and self.options.epochs is None):
            self.curriculum = named.create(options, Candidates(self.rows, self.draw_seed))
        self.read_held_out(reader)

    def read_held_out(self, reader: DataReader) -> None:
        """Reads the rows of `held_out`, if the stage has such rows."""
        from rl.data.shard import joined  # imports jax

        if self.options.held_out is not None:
            sources = datasets_of(self.options.held_out.data)
            shards = [self.read(reader, each, held_out=True) for each in sources]
            self.held_out_rows = joined(shards, sources)

    def held_out_examples(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the held-out rows with these numbers of all processes, in the form of
        `to_batch`."""
        assert self.held_out_rows is not None
        return self.held_out_rows.take(numbers)

    def problems(self) -> list:
        """Returns the problems of this process, which the generator completes."""
        return []

    @property
    def examples(self) -> int:
        """Returns how many examples of all processes make a pass over the data (an epoch)."""
        return self.rows.total

    @property
    def examples_of_pass(self) -> int:
        """Returns how many of the examples make a pass: with a curriculum, those that it chooses
        from."""
        rows = None if self.curriculum is None else self.curriculum.rows
        return self.examples if rows is None else len(rows)

    def steps_of(self, epochs: float) -> int:
        """Returns the steps that take every example of a pass `epochs` times, rounded up: the last
        step may begin the next epoch. The result is exact for the decimal number that `epochs` was
        written as."""
        return ceil(Fraction(str(epochs)) * self.examples_of_pass / self.options.prompts_per_step)

    def restore_curriculum(self, producer: dict[str, Any]) -> None:
        """Gives the curriculum its state in a checkpoint (`producer_state`). A run that goes on
        calls it before a model is built. Raises DataError if the state does not fit the rows of
        the data."""
        if self.curriculum is not None:
            self.curriculum.restore(producer.get("curriculum", {}))

    @property
    def draw_seed(self) -> int:
        """Returns the seed of the order of the rows."""
        return self.config.seed * 1000 + self.index

    @cached_property
    def example_order(self) -> ExampleOrder:
        """The order of the examples that the stage takes one after the other."""
        chosen = None
        if self.curriculum is not None:
            chosen = Candidates(self.rows, self.draw_seed).among(self.curriculum.rows)
        return ExampleOrder(self.rows, self.examples, self.draw_seed, chosen)

    def draw_examples(self, count: int | None = None) -> list[int]:
        """Draws the next `count` examples, in shuffled order or by the curriculum, and counts them
        as drawn. None: `prompts_per_step`.

        Returns their indices in the data.
        """
        progress = self.context.progress
        count = self.options.prompts_per_step if count is None else count
        start = progress.examples_drawn
        progress.examples_drawn += count
        if self.curriculum is None:
            # The examples of the next step too: their pictures are read while this one is computed.
            known = self.example_order.take(range(start, start + 2 * count))
        else:
            assert self.options.curriculum is not None
            name = self.options.curriculum.name
            known = named.chosen(self.curriculum, name, count, self.examples)
        self.example_numbers = known[:count]
        if self.context.tables is not None:
            self.context.tables.prefetch(self.rows.held(self.example_order.rows_of(known)))
        return self.example_numbers

    def data_metrics(self) -> dict[str, float]:
        """Returns the metrics of the rows that a step took, and of the passes over the data; {}
        where the stage has drawn none."""
        drawn = self.context.progress.examples_drawn
        if not drawn:
            return {}
        metrics = {"data/epoch": drawn / self.examples_of_pass} | self.example_order.epochs(drawn)
        if self.has_sources and not self.trains_on_rollouts:
            metrics |= by_source.of_rows(self.example_order.sources_of(self.example_numbers))
        return metrics
