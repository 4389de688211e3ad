"""A stage that learns from demonstrations. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl.stages import inputs
from rl.stages.shapes import abstract_batch, abstract_rows, update_program
from rl.stages.stage import ConfigProblems, Program, StageKind

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.training.batch import Batch
    from rl.training.trainer import RunState


class Stage(StageKind):
    """Updates the policy on examples of a dataset."""

    examples: Shard

    def _check_kind(self) -> ConfigProblems:
        yield from self._check_offline()
        if self.options.algorithm.name != "sft":
            yield from self._check_no_capacity()

    def prepare(self, reader: DataReader) -> None:
        self.examples = reader.demonstrations(self.data, self.algorithm.train_on)
        self.prepare_rewards(reader, [])

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        state = inputs.state_of(self.inputs)
        self.trainer = Trainer(graph, self.options, self.algorithm, self.config.seed, state=state)

    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        state, updates = self.abstract(), self.options.updates_per_step
        batch = self.abstract_batch(abstract_rows(self, updates)[0])
        yield update_program(self, "update", batch, state.policy, ({}, None), (state.policy, None), updates)
        yield from inputs.programs(self, state, None)

    def abstract_batch(self, shape: tuple[int, int]) -> Batch:
        """Returns a packed batch as shapes."""
        return abstract_batch(shape, None, *inputs.fields(self))

    def batch(self) -> Batch:
        """Returns the batch of the next step, one example per row."""
        from rl.training.batch import padded_batch

        return padded_batch(self.examples.take(self.draw_examples(self.examples.total)), self.config.max_length)

    def complete(self, data: inputs.StepData) -> None:
        """Changes the batch after its inputs have been added. By default it changes nothing."""

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes `updates_per_step` updates on the next `prompts_per_step` examples."""
        flops_before = self.trainer.total_flops
        with self.context.timeline.span("data"):
            data = inputs.StepData(state, self.batch())
        if self.inputs:
            inputs.run_model_passes(self, data)
        self.complete(data)
        state, updated = self.update(state, data.batch)
        updated["perf/step_tflop"] = (self.trainer.total_flops - flops_before) / 1e12
        return state, data.metrics | updated
