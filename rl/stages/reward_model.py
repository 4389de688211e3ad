"""A stage that trains a reward model on preferred pairs. The policy stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl.data.tokenizer import write_tokenizer
from rl.errors import Fault
from rl.stages.preference import pairs_with_expanded
from rl.stages.scorers import reward_model_of
from rl.stages.shapes import abstract_batch, abstract_rows, held_out_program, update_programs
from rl.stages.sharing import sharing_of
from rl.stages.stage import Program, StageKind

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.config.data import DataOptions
    from rl.data.encoded import Pair
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt
    from rl.training.reward_model import RewardModelState
    from rl.training.updates.optimizer_step import ParamState


class Stage(StageKind["RewardModelState"]):
    """Updates a copy of the policy with a score head."""

    trains_policy = False
    sequences_per_row = 2
    answers_share_prompts = True

    def _check_kind(self) -> Iterator[Fault]:
        stage = self.options
        options = {
            "mtp": stage.mtp is not None,
            "diagnostics": stage.diagnostics,
            "indexer": stage.indexer.training != "off",
        }
        for key in filter(options.get, options):
            text = (
                f"{stage.algorithm.name} does not update the policy, so this option has no "
                "effect; leave it out"
            )
            yield Fault(text, key=(*self.path, key))
        yield from self._check_offline()
        yield from self._check_no_capacity()

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        return reader.pairs(source, held_out=held_out)

    def prepare(self, reader: DataReader) -> None:
        self.read_rows(reader)

    def to_batch(self, rows: Sequence[Pair]) -> tuple[Batch, ExpandedAt]:
        return pairs_with_expanded(rows, self.config.max_length)

    def bind(self, graph: Graph) -> None:
        from rl.training.reward_model import RewardModelTrainer

        self.trainer = RewardModelTrainer(graph, self.options, self.algorithm, self.config.seed)
        self.trainer.row_length = self.row_length
        self.trainer.sharing = sharing_of(self, graph)

    def learner(self, state: RewardModelState) -> ParamState:
        return state.reward_model

    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        state = self.abstract()
        updates = self.options.updates_per_step
        batch = abstract_batch(abstract_rows(self, updates).shape, None, "margin")
        yield from update_programs(self, state, batch, updates)
        yield from held_out_program(self, state, batch, state.reward_model)

    def step(self, state: RewardModelState, n: int) -> tuple[RewardModelState, dict[str, float]]:
        """Makes `updates_per_step` updates on the next `prompts_per_step` pairs."""
        flops_before = self.trainer.total_flops
        context = self.context
        with context.timeline.span("data"):
            pairs = self.rows.take(self.draw_examples())
            batch, table = context.with_media(*self.to_batch(pairs))
        state, metrics = self.update(state, batch, n, table)
        return state, metrics | {
            "perf/step_tflop": (self.trainer.total_flops - flops_before) / 1e12
        }

    def finish(
        self, state: RewardModelState, write: Callable[[Path, Callable[[Path], None]], None]
    ) -> None:
        with self.context.timeline.span("export", stage=self.name):
            write(reward_model_of(self.config, self.name), partial(self._write, state))
        super().finish(state, write)

    def _write(self, state: RewardModelState, directory: Path) -> None:
        from policy.mesh import processes
        from rl.stages.export import proof
        from rl.stages.export.of_run import ExportedRun

        tokenizer = self.context.tokenizer
        written = self.trainer.export(state, tokenizer.pad_token_id, directory)
        if processes.first():
            write_tokenizer(self.config, tokenizer, directory)
        proof.check_classifier(ExportedRun.of(self.context), written, directory)

    def export_at(self, state: RewardModelState, directory: Path) -> None:
        self._write(state, directory)

    def export(self, directory: Path) -> None:
        from policy.mesh import processes

        if processes.first():
            shutil.copytree(reward_model_of(self.config, self.name), directory)
