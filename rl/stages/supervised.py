"""A stage that learns from demonstrations, and from a teacher if the algorithm has one. Nothing is
sampled.

N rows, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rl.data import teacher as teachers
from rl.data.teacher_files import TeacherFiles, vocabulary_sha256
from rl.errors import ConfigError, Fault
from rl.stages import inputs
from rl.stages.sampling import by_source
from rl.stages.scorers import abstract_teacher
from rl.stages.shapes import abstract_batch, abstract_rows, held_out_program, update_programs
from rl.stages.sharing import sharing_of
from rl.stages.stage import Program, StageKind

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.config.data import DataOptions
    from rl.data.encoded import Row
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.stages.context import Context
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt, StepTable
    from rl.training.trainer import RunState, TokenOutputs


class Stage(StageKind["RunState"]):
    """Updates the policy on examples of a dataset."""

    def _check_kind(self) -> Iterator[Fault]:
        yield from self._check_offline()
        if self.options.algorithm.name != "sft":
            yield from self._check_no_capacity()

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        return reader.demonstrations(source, self.algorithm.train_on, held_out=held_out)

    def prepare(self, reader: DataReader) -> None:
        self.read_rows(reader)
        self.prepare_rewards(reader, [])
        reader.check_teacher(self.teacher, self.options.sampling.stop_token_ids)
        if self.teacher is not None and self.teacher.files is not None:
            self._check_teacher_files(reader)

    def _check_teacher_files(self, reader: DataReader) -> None:
        """Raises ConfigError or DataError for files of a teacher that do not fit the run or its
        data."""
        stops = tuple({*reader.stop_ids, *self.options.sampling.stop_token_ids})
        facts = self.teacher_rows.facts
        where = f"teacher.files: {self.teacher.files}"
        if facts.vocabulary_sha256 != vocabulary_sha256(reader.tokenizer):
            raise ConfigError(
                f"{where} was written with another tokenizer; run `rl teach` with the tokenizer "
                "of this run"
            )
        teachers.check_stops(where, tuple(facts.stops), reader.tokenizer, stops)
        if (self.algorithm.top_k or 1) > facts.k:
            raise ConfigError(
                f"{where} holds {facts.k} tokens in each place, top_k asks for "
                f"{self.algorithm.top_k}"
            )
        self.teacher_rows.check_rows(self.rows.numbered(), self.rows.total)

    @cached_property
    def teacher_rows(self) -> TeacherFiles:
        """Returns the files of the teacher. Raises ConfigError."""
        return TeacherFiles(self.teacher.files)

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        state = inputs.state_of(self.inputs)
        teacher = abstract_teacher(self.config, self.teacher, self.algorithm, graph.layout)
        self.trainer = Trainer(
            graph,
            self.options,
            self.algorithm,
            self.config.seed,
            state=state,
            returns_tokens=self._records_losses,
            teacher=teacher,
        )
        self.trainer.row_length = self.row_length
        self.trainer.sharing = sharing_of(self, graph)

    @property
    def _records_losses(self) -> bool:
        """Whether a step tells the losses of its sources apart: those of rows with one sequence."""
        return self.has_sources and self.sequences_per_row == 1

    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        state = self.abstract()
        updates = self.options.updates_per_step
        batch = self.abstract_batch(abstract_rows(self, updates).shape)
        yield from update_programs(self, state, batch, updates)
        yield from inputs.programs(self, state, None)
        yield from held_out_program(self, state, batch, state.policy)

    def abstract_batch(self, shape: tuple[int, int]) -> Batch:
        """Returns a packed batch as shapes."""
        batch = abstract_batch(shape, None, *inputs.fields(self))
        if self.teacher is None or self.teacher.files is None:
            return batch
        return batch.replace(**self.teacher_rows.shapes(shape, self.algorithm.top_k))

    def batch(self) -> tuple[Batch, ExpandedAt]:
        """Returns (the batch of the next step, one example per row; the pictures and sounds of its
        sequences)."""
        return self.to_batch(self.rows.take(self.draw_examples()))

    def to_batch(self, rows: Sequence[Row]) -> tuple[Batch, ExpandedAt]:
        from rl.training.batch import padded_batch

        return padded_batch(rows, self.config.max_length), expanded_at([(row,) for row in rows])

    def complete(self, data: inputs.StepData) -> None:
        """Changes the batch after its inputs have been added. By default it changes nothing."""

    def start(self, context: Context, restored: RunState | None = None) -> RunState:
        state = super().start(context, restored)
        if self.teacher is not None and restored is None:
            rows = self.rows.take(range(min(self.rows.total, self.options.prompts_per_step)))
            self.check_vocabularies(self.trainer.policy_params(state), rows)
        return state

    def with_inputs(self, state: RunState, batch: Batch, table: StepTable | None) -> Batch:
        data = inputs.StepData(state, batch, table=table)
        for when in (inputs.EXAMPLES, inputs.MODEL_PASSES):
            inputs.provide(self, data, when)
        self.complete(data)
        return data.batch

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes `updates_per_step` updates on the next `prompts_per_step` examples."""
        flops_before = self.trainer.total_flops
        progress = self.context.progress
        progress.adaptive_coefs |= self.algorithm.scheduled_coefs(
            (n - 1) / self.options.total_steps
        )
        with self.context.timeline.span("data"):
            batch, table = self.context.with_media(*self.batch())
            data = inputs.StepData(state, batch, table=table)
            inputs.provide(self, data, inputs.EXAMPLES)
        if inputs.any_at(self, inputs.MODEL_PASSES):
            inputs.run_model_passes(self, data)
        self.complete(data)
        outputs: list[TokenOutputs] = []
        on_tokens = outputs.append if self._records_losses else None
        state, updated = self.update(state, data.batch, n, data.table, on_tokens=on_tokens)
        if outputs:
            logp_NT = np.concatenate([each.on_host()["logp"] for each in outputs])
            sources = self.example_order.sources_of(self.example_numbers)
            updated |= by_source.of_losses(sources, logp_NT, data.batch.mask)
        updated["perf/step_tflop"] = (self.trainer.total_flops - flops_before) / 1e12
        return state, data.metrics | updated


def expanded_at(sequences: Sequence[Sequence[Row]]) -> ExpandedAt:
    """Returns (row, first column, pictures and sounds) of the sequences in each row of a batch."""
    result = []
    for number, row in enumerate(sequences):
        starts = [0, *itertools.accumulate(len(each.ids) for each in row)]
        result += [(number, start, each.expanded) for start, each in zip(starts, row, strict=False)]
    return result
