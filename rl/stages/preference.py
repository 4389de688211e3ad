"""A stage that learns from preferred pairs: a chosen and a rejected answer to a prompt. Nothing is
sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl.data.encoded import Pair
from rl.stages import inputs, supervised
from rl.stages.shapes import abstract_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl.config.data import DataOptions
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt


class Stage(supervised.Stage):
    """Updates the policy on pairs, both answers of a pair in one row."""

    sequences_per_row = 2
    answers_share_prompts = True

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        return reader.pairs(source, held_out=held_out)

    def prepare(self, reader: DataReader) -> None:
        self.read_rows(reader)
        self.prepare_rewards(reader, [])

    def abstract_batch(self, shape: tuple[int, int]) -> Batch:
        return abstract_batch(shape, None, *inputs.fields(self), "margin")

    def to_batch(self, rows: Sequence[Pair]) -> tuple[Batch, ExpandedAt]:
        return pairs_with_expanded(rows, self.config.max_length)


def pairs_with_expanded(pairs: Sequence[Pair], max_length: int) -> tuple[Batch, ExpandedAt]:
    """Returns (a batch with one pair per row, the pictures and sounds of its sequences)."""
    return batch_of(pairs, max_length), supervised.expanded_at(
        [(pair.chosen, pair.rejected) for pair in pairs]
    )


def batch_of(pairs: Sequence[Pair], max_length: int) -> Batch:
    """Returns a batch with one pair per row. `Batch.segments` is 1 on the chosen answer, 2 on the
    rejected one."""
    from rl.training.batch import segmented_batch

    batch = segmented_batch([(pair.chosen, pair.rejected) for pair in pairs], 2 * max_length)
    margin = np.asarray([pair.margin for pair in pairs], np.float32)
    return batch.replace(margin=np.broadcast_to(margin[:, None], batch.tokens.shape))
