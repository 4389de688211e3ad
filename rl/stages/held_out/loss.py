"""Measures the loss of a stage on held-out rows, with the programs of the stage and without a
gradient.

The rows are computed in blocks of as many rows as an update has. The sums of a block are divided by
the counts of all rows, so that the blocks add up to the metrics of one mini-batch of all rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.algorithms import reduce_metrics
from rl.stages.sampling.by_source import numbers_by_prefix

if TYPE_CHECKING:
    from rl.stages.stage import StageKind, StageState
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt, StepTable


class HeldOutLoss:
    """The loss of a stage on its held-out rows. Changes nothing of the run."""

    def __init__(self, stage: StageKind):
        """Computes nothing yet. stage: with held-out rows, bound to a model, in a run."""
        self._stage = stage

    @classmethod
    def of(cls, stage: StageKind) -> HeldOutLoss | None:
        """Returns the loss of a stage, or None if it has no held-out rows."""
        return None if stage.options.held_out is None else cls(stage)

    @property
    def every(self) -> int:
        """After how many steps a measurement follows; 0: only before the first and
        after the last one."""
        options = self._stage.options.held_out
        return 0 if options is None else options.every

    def run(self, state: StageState) -> dict[str, float]:
        """Returns held_out/NAME for each metric NAME of the loss under the weights of a state, and
        time/held_out."""
        began = time.perf_counter()
        stage = self._stage
        flops = stage.trainer.total_flops
        metrics = {}
        with stage.context.timeline.span("held-out loss", stage=stage.name):
            for prefix, rows in self._rows.items():
                values = self._loss(state, rows, self._counts[prefix])
                metrics |= {f"{prefix}{name}": float(value) for name, value in values.items()}
        stage.trainer.total_flops = flops  # those of training
        return metrics | {"time/held_out": time.perf_counter() - began}

    def _loss(self, state: StageState, rows: Sequence[Any], counts: Counter[str]) -> dict[str, Any]:
        """Returns the metrics of the loss of these rows. counts: what the loss divides by."""
        stage = self._stage
        coefs = stage.context.progress.adaptive_coefs
        blocks = []
        for batch, shown in self._batches(rows):
            batch, table = self._with_media(batch, shown)
            batch = stage.with_inputs(state, batch, table)
            options = {"table": table and table.table, "adaptive_coefs": coefs}
            blocks.append(stage.trainer.held_out_loss(state, batch, counts, **options))
        return reduce_metrics(
            {name: np.asarray([block[name] for block in blocks]) for name in blocks[0]}
        )

    @cached_property
    def _rows(self) -> dict[str, list[Any]]:
        """Returns the rows of all sources, and of each of several, by the beginning of the names of
        their metrics."""
        stage = self._stage
        held_out = stage.held_out_rows
        assert held_out is not None
        numbers = numbers_by_prefix("held_out/", held_out.total, held_out.sources or ())
        return {prefix: stage.held_out_examples(each) for prefix, each in numbers.items()}

    @cached_property
    def _counts(self) -> dict[str, Counter[str]]:
        """Returns the counts of the rows that a loss divides by, as in `_rows`."""
        result = {}
        for prefix, rows in self._rows.items():
            result[prefix] = counts = Counter[str]()
            for batch, _ in self._batches(rows):
                counts.update(self._stage.trainer.counts(self._stage.only_counted(batch)))
        return result

    def _batches(self, rows: Sequence[Any]) -> Iterator[tuple[Batch, ExpandedAt]]:
        """Yields rows in blocks, the last one filled with rows of padding."""
        size = self._stage.rows_per_update
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            batch, shown = self._stage.to_batch(block)
            if missing := size - len(block):
                batch = batch.with_padding(missing)
            yield batch, shown

    def _with_media(self, batch: Batch, shown: ExpandedAt) -> tuple[Batch, StepTable | None]:
        context = self._stage.context
        if context.tables is None:
            return batch, None
        table = context.media_table([expanded for *_, expanded in shown], counted=False)
        return table.add(batch, shown), table
