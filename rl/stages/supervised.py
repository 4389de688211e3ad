"""A stage that learns from demonstrations, and from a teacher if the algorithm has one. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rl.data import teacher as teachers
from rl.data.teacher_files import TeacherFiles, vocabulary_sha256
from rl.errors import ConfigError, ModelError, ResourceError
from rl.stages import inputs
from rl.stages.shapes import abstract_batch, abstract_rows, update_program
from rl.stages.stage import ConfigProblems, Program, StageKind

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout
    from policy.model import Graph
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.stages.context import Context
    from rl.training.batch import Batch
    from rl.training.teacher import Teacher
    from rl.training.trainer import RunState

MOST_OUTSIDE = 1e-3
"""Largest probability that the policy may give to ids that a teacher's smaller vocabulary does not have."""


class Stage(StageKind):
    """Updates the policy on examples of a dataset."""

    examples: Shard

    def _check_kind(self) -> ConfigProblems:
        yield from self._check_offline()
        if self.options.algorithm.name != "sft":
            yield from self._check_no_capacity()
        if "teacher" in self.inputs and self.teacher is None:
            text = "needs a teacher: set `teacher: {source: DIRECTORY}`, here or for all stages, or `files`"
            yield (*self.path, "teacher"), f"{self.algorithm.name} {text}"

    def prepare(self, reader: DataReader) -> None:
        self.examples = reader.demonstrations(self.data, self.algorithm.train_on)
        self.prepare_rewards(reader, [])
        if self.teacher is not None:
            self._check_teacher(reader)

    def _check_teacher(self, reader: DataReader) -> None:
        """Raises ConfigError, ModelError or DataError for a teacher that does not fit the run or its data."""
        stops = tuple({*reader.stop_ids, *self.options.sampling.stop_token_ids})
        if self.teacher.files is None:
            teachers.check_teacher(self.teacher, reader.tokenizer, stops)
            return
        facts, where = self.teacher_rows.facts, f"teacher.files: {self.teacher.files}"
        if facts.vocabulary_sha256 != vocabulary_sha256(reader.tokenizer):
            raise ConfigError(
                f"{where} was written with another tokenizer; run `rl teach` with the tokenizer of this run"
            )
        teachers.check_stops(where, tuple(facts.stops), reader.tokenizer, stops)
        if (self.algorithm.top_k or 1) > facts.k:
            raise ConfigError(f"{where} holds {facts.k} tokens in each place, top_k asks for {self.algorithm.top_k}")
        self.teacher_rows.check_rows(self.examples.numbered(), self.examples.total)

    @cached_property
    def teacher_rows(self) -> TeacherFiles:
        """Returns the files of the teacher. Raises ConfigError."""
        return TeacherFiles(self.teacher.files)

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        state = inputs.state_of(self.inputs)
        teacher = None if self.teacher is None else self.bound_teacher(graph.layout)
        self.trainer = Trainer(graph, self.options, self.algorithm, self.config.seed, state=state, teacher=teacher)

    def bound_teacher(self, mesh: Layout) -> Teacher:
        """Returns the teacher on the mesh of the run, without weights. Raises ConfigError or ModelError."""
        from policy.model import Graph
        from policy.ops.host_memory import NoHostMemory
        from rl.training.teacher import ModelTeacher, StoredTeacher

        options = self.teacher
        if options.files is not None:
            return StoredTeacher(self.algorithm)
        runtime = self.config.model.runtime
        dtype = options.dtype or runtime.dtype
        runtime = replace(runtime, dtype=dtype, param_dtype=dtype, remat="full", remat_tensors=(), quantization=None)
        runtime = replace(runtime, host_parameters=options.host_memory, table_memory="device", batch_split=False)
        decoder, directory = teachers.decoder_of(options), teachers.directory_of(options)
        try:
            frozen = Graph(decoder, runtime, mesh)
        except NoHostMemory:
            raise ResourceError(
                "teacher.host_memory: these devices have no host memory that programs can read; set it to false"
            ) from None
        except ValueError as error:
            raise ConfigError(f"teacher {options.source}: {error}") from None
        return ModelTeacher(frozen, self.algorithm, directory, self.config.seed, options.weights)

    def frozen(self) -> list[Any]:
        teacher = self.trainer.teacher
        return [*super().frozen(), *([] if teacher is None else [teacher.abstract])]

    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        state, updates = self.abstract(), self.options.updates_per_step
        batch = self.abstract_batch(abstract_rows(self, updates)[0])
        frozen = {} if self.trainer.teacher is None else dict(self.trainer.teacher.abstract)
        resident = state.policy, state.projections, frozen
        yield update_program(self, "update", batch, state.policy, (frozen, state.projections), resident, updates)
        yield from inputs.programs(self, state, None)

    def abstract_batch(self, shape: tuple[int, int]) -> Batch:
        """Returns a packed batch as shapes."""
        batch = abstract_batch(shape, None, *inputs.fields(self))
        if self.teacher is None or self.teacher.files is None:
            return batch
        return batch.replace(**self.teacher_rows.shapes(shape, self.algorithm.top_k))

    def batch(self) -> Batch:
        """Returns the batch of the next step, one example per row."""
        from rl.training.batch import padded_batch

        return padded_batch(self.examples.take(self.draw_examples(self.examples.total)), self.config.max_length)

    def complete(self, data: inputs.StepData) -> None:
        """Changes the batch after its inputs have been added. By default it changes nothing."""

    def start(self, context: Context, restored: Any = None) -> RunState:
        if (teacher := self.trainer.teacher) is not None:
            if self.teacher.source is not None:
                teachers.directory_of(self.teacher, weights=True)  # downloads those of the hub
            with context.timeline.span("loading the teacher", stage=self.name):
                teacher.read()
        state = super().start(context, restored)
        if teacher is not None and restored is None:
            self._check_vocabulary(teacher, state)
        return state

    def _check_vocabulary(self, teacher: Teacher, state: RunState) -> None:
        """Raises ModelError if the policy uses ids that are padding in the vocabulary of the teacher."""
        from rl.training.batch import padded_batch

        graph = self.trainer.graph
        vocabulary = teacher.vocabulary(graph)
        if graph.config.vocab_size <= vocabulary:
            return
        first = self.examples.take(range(min(self.examples.total, self.options.prompts_per_step)))
        outside = teacher.outside(graph, state.policy.params, padded_batch(first, self.config.max_length))
        if outside > MOST_OUTSIDE:
            raise ModelError(
                f"teacher {self.teacher.source} has {vocabulary} ids, the policy {graph.config.vocab_size}, and gives "
                f"those beyond a probability of {outside:.2g} (most: {MOST_OUTSIDE:g}); the divergence does not see "
                "them. Train the policy on texts first (sft), or use models of the same width"
            )

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes `updates_per_step` updates on the next `prompts_per_step` examples."""
        flops_before, progress = self.trainer.total_flops, self.context.progress
        progress.adaptive_coefs |= self.algorithm.scheduled_coefs((n - 1) / self.options.steps)
        with self.context.timeline.span("data"):
            data = inputs.StepData(state, self.batch())
            inputs.provide(self, data, inputs.EXAMPLES)
        if inputs.any_at(self, inputs.MODEL_PASSES):
            inputs.run_model_passes(self, data)
        self.complete(data)
        state, updated = self.update(state, data.batch)
        updated["perf/step_tflop"] = (self.trainer.total_flops - flops_before) / 1e12
        return state, data.metrics | updated
