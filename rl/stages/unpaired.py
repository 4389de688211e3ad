"""A stage that learns from single answers that are labelled good or bad. Nothing is sampled.

Rows hold `prompt`, `completion` and `label` (true, false, 1 or 0), or pairs as in preferences. Each
answer of a pair is an example of its own. N rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rl.data.encoded import Row
from rl.data.limits import cut_row
from rl.data.rows.forms import label_of, read_labelled
from rl.errors import DataError, Fault
from rl.stages import inputs, supervised
from rl.stages.shapes import abstract_batch
from rl.stages.supervised import expanded_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl.config.data import DataOptions
    from rl.data.encoded import Example
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt

Answer = tuple[Row, float]
"""(row of a prompt with its answer, label: 1 for a good answer, 0 for a bad one)."""


class Stage(supervised.Stage):
    """Updates the policy on labelled answers.

    While inputs are computed, a row also holds its prompt with the answer to another prompt, to
    estimate the KL.
    """

    sequences_per_row = 2

    def _check_kind(self) -> Iterator[Fault]:
        yield from super()._check_kind()
        if self.options.curriculum is not None:
            yield Fault(
                "a curriculum chooses rows, and this stage takes both answers of a pair one by "
                "one; leave it out",
                key=(*self.path, "curriculum"),
            )
        if "old_logp" in self.inputs and self.rows_per_update < 2:
            yield Fault(
                "the KL is estimated from answers to other prompts, so an update needs at least 2 "
                "rows",
                key=(*self.path, "prompts_per_step"),
            )

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        def encode(example: Example) -> list[list[Answer]]:
            if example.pair is not None:
                pair = zip(example.pair, (1.0, 0.0), strict=True)
                return [[(reader.answer(example, each), label) for each, label in pair]]
            answer = example.completion
            if example.messages is not None:
                answer = example.messages[len(example.prompt) :]
            return [[(reader.answer(example, answer), label_of(example))]]

        def length(answers: list[Answer]) -> int:
            return max(len(row.ids) for row, _ in answers)

        def cut(answers: list[Answer], end: int) -> list[Answer] | None:
            rows = [(cut_row(row, end), label) for row, label in answers]
            kept = [(row, label) for row, label in rows if row is not None]
            return kept if len(kept) == len(answers) else None

        return reader.rows(
            source, ("answers",), encode, length, cut, read=read_labelled, held_out=held_out
        )

    def prepare(self, reader: DataReader) -> None:
        from policy.mesh import processes

        self.read_rows(reader)
        counts = {len(answers) for answers in self.rows.own}
        counts = set().union(*processes.all_gather_object(counts))
        if len(counts) > 1:
            names = ", ".join(each.path or f"task {each.task}" for each in self.datasets)
            raise DataError(
                f"{self.name}: some rows of {names} are pairs and others answers with a label; "
                "give them one form, or stages of their own"
            )
        self.answers_per_example = max(counts, default=0)
        self.prepare_rewards(reader, [])

    @property
    def examples(self) -> int:
        return self.rows.total * self.answers_per_example

    def abstract_batch(self, shape: tuple[int, int]) -> Batch:
        extra = ("label", "kl") if "old_logp" in self.inputs else ("label",)
        return abstract_batch(shape, None, *inputs.fields(self), extra=extra)

    def batch(self) -> tuple[Batch, ExpandedAt]:
        per_example = self.answers_per_example
        numbers = self.draw_examples()
        examples = self.rows.take(self.example_order.rows_of(numbers))
        return self.to_batch(
            [
                example[number % per_example]
                for example, number in zip(examples, numbers, strict=True)
            ]
        )

    def to_batch(self, rows: Sequence[Answer]) -> tuple[Batch, ExpandedAt]:
        size = self.rows_per_update if "old_logp" in self.inputs else None
        sequences = sequences_of([row for row, _ in rows], self.config.max_length, size)
        batch = batch_of(sequences, [label for _, label in rows], self.config.max_length)
        return batch, expanded_at(sequences)

    def held_out_examples(self, numbers: Sequence[int]) -> list[Answer]:
        return [answer for answers in super().held_out_examples(numbers) for answer in answers]

    def only_counted(self, batch: Batch) -> Batch:
        return without_others(batch)

    def complete(self, data: inputs.StepData) -> None:
        if "old_logp" in self.inputs:
            data.batch = with_kl(data.batch)


def sequences_of(answers: list[Row], max_length: int, rotate: int | None) -> list[list[Row]]:
    """Returns the sequences of each row of a batch.

    rotate: number of rows in an update. The second sequence of a row then is the prompt of the row
    with the answer of the previous row in the same update (for the first row, the last row), cut at
    `max_length`. None: there is none, as for a row alone.
    """
    sequences = [[row] for row in answers]
    if rotate is None:
        return sequences
    for i, row in enumerate(answers):
        start = i - i % rotate  # first row of the update
        count = min(rotate, len(answers) - start)
        if count > 1:
            sequences[i].append(
                _mismatched(row, answers[start + (i - start - 1) % count], max_length)
            )
    return sequences


def batch_of(sequences: list[list[Row]], labels: list[float], max_length: int) -> Batch:
    """Returns a batch of labelled answers, one per row. `Batch.segments` is 1 on the first
    sequence of a row, 2 on the second."""
    from rl.training.batch import segmented_batch

    batch = segmented_batch(sequences, 2 * max_length)
    labels_N1 = np.asarray(labels, np.float32)[:, None]
    return batch.replace(extra={"label": np.broadcast_to(labels_N1, batch.tokens.shape)})


def _mismatched(row: Row, other: Row, max_length: int) -> Row:
    """Returns the prompt of one row with the answer of another."""
    end = row.mask.index(1)
    start = other.mask.index(1)
    ids = [*row.ids[:end], *other.ids[start:]]
    mask = [*row.mask[:end], *other.mask[start:]]
    return Row(ids[:max_length], mask[:max_length], row.expanded and row.expanded.first(end))


def with_kl(batch: Batch) -> Batch:
    """Returns the batch without the answers to other prompts, and their log-ratio to the reference
    as `extra["kl"]`."""
    assert batch.old_logp is not None and batch.ref_logp is not None and batch.extra is not None
    other = batch.segments == 2
    ratio = np.where(other & (batch.mask != 0), batch.old_logp - batch.ref_logp, 0.0).sum(
        axis=1, keepdims=True
    )
    kl = np.broadcast_to(ratio.astype(np.float32), batch.tokens.shape)
    return without_others(batch).replace(extra=batch.extra | {"kl": kl})


def without_others(batch: Batch) -> Batch:
    """Returns the batch without the answers to other prompts."""
    other = batch.segments == 2
    return batch.replace(
        segments=np.where(other, 0, batch.segments),
        mask=np.where(other, 0, batch.mask).astype(np.float32),
    )
