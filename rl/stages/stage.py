"""The interface of a stage for the loop, the planner, checkpoints and the configuration.

A stage goes through five phases. Their main methods:

    check, remarks             configuration (rl/stages/configured.py): what is wrong with it, and
                               settings without an effect; reads no data, does not import jax
    prepare                    data (rl/stages/rows.py): reads rows, makes the runner of rewards
    bind, abstract, programs   model: defines the functions to compile; lists them for a plan
    load_scorers, start, use, step, evaluation, producer_state
                               run: a state, one step after the other, and the part of a checkpoint
                               that holds no arrays
    finish, export             files

A step takes `prompts_per_step` rows of data: prompts, demonstrations or pairs. It makes
`updates_per_step` updates, each on a mini-batch: an equal part of the rows, as in PPO. An update
sums the gradients of micro-batches.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from rl.accounting.flops import rates
from rl.stages.export.policy import write_policy
from rl.stages.rows import StageWithRows
from rl.stages.sampling.evaluation import Evaluation, answer_of
from rl.stages.sampling.params import sampling_params
from rl.stages.sampling.records import write_samples
from rl.stages.sharing import sharing_of
from rl.training.packing.row_shapes import RowHistory
from rollout.collect import Rollouts, Source, collect

if TYPE_CHECKING:
    from policy.adapters.learning import Adapters
    from policy.cache.media import MediaTable
    from policy.model import Graph
    from policy.programs.compiled_cache import CompiledCache
    from rewards import Scores
    from rl.config.run import RunConfig
    from rl.config.stage import StageOptions
    from rl.data.reader import DataReader
    from rl.stages.context import Context
    from rl.stages.sampling.teacher_prompt import TeacherPrompt
    from rl.training.batch import Batch
    from rl.training.media.tables import ExpandedAt, StepTable
    from rl.training.packing.trees import Sharing
    from rl.training.reward_model import RewardModelScorer, RewardModelState
    from rl.training.teachers.scorer import TeacherScorer
    from rl.training.teachers.teacher import Teacher
    from rl.training.trainer import RunState
    from rl.training.updates.optimizer_step import ParamState
    from rollout import SamplingParams

    StageState: TypeAlias = RunState | RewardModelState


State = TypeVar("State", bound="StageState")
"""The arrays of a kind of stage: a RunState, or the RewardModelState of one that trains a reward
model."""


@dataclass(frozen=True)
class Program:
    """A compiled function of a step, described for a plan.

    kind: name in `executables`
    shape: (rows, tokens per row) of its token arrays
    lower: traces and lowers it
    graph: the model that it runs
    resident: shapes of the arguments that stay on the devices during the run, such as weights and
        moments; the plan counts them once for all programs
    times: calls per step
    trip_count: iterations of its loop over micro-batches; computed at run time, so the compiler
        does not know it
    micro_rows: rows per iteration; None: all rows in one iteration
    rollout_memory: whether the generator's resharded weights (`Context.resharded`) are on the
        devices while it runs
    teacher: the model whose forward pass it contains
    adapters: what an update changes over weights that stay; None: no adapter
    gradient: bytes per device of an update's float32 gradient
    stepped: bytes per device of the weights and moments that the optimizers of an update change
    optimizer_operations: operations of these optimizers' matrix products, on all devices
    notes: lines that a plan shows about it
    """

    kind: str
    shape: tuple[int, ...]
    lower: Callable[[], Any]
    graph: Graph
    resident: Any
    times: float
    trip_count: int = 1
    micro_rows: int | None = None
    rollout_memory: bool = False
    teacher: Graph | None = None
    adapters: Adapters | None = None
    gradient: int = 0
    stepped: int = 0
    optimizer_operations: float = 0.0
    notes: tuple[str, ...] = ()


class StageKind(StageWithRows, Generic[State]):
    """The base class of the kinds of stages: one subclass a kind (rl/stages/*.py:Stage). An
    instance is one stage of a run."""

    def __init__(self, config: RunConfig, index: int):
        super().__init__(config, index)
        # rewards.Runner, which calls the reward functions; None: nothing is rewarded.
        self.runner: Any = None
        # Reward models, by their names in the rewards.
        self.scorers: dict[str, RewardModelScorer] = {}
        # Teachers that score completions before the updates, and the prompt that they read (None:
        # that of the policy).
        self.teacher_scorers: list[TeacherScorer] = []
        self.teacher_prompt: TeacherPrompt | None = None
        self.trainer: Any = None
        # Of pictures and sounds, in a plan of a run with them.
        self.table_shapes: MediaTable | None = None

    # Batches of rows.

    def to_batch(self, rows: Sequence[Any]) -> tuple[Batch, ExpandedAt]:
        """Returns (a batch with these rows of data, the pictures and sounds of its sequences)."""
        raise NotImplementedError(f"{self.name} makes its batches from completions")

    def with_inputs(self, state: State, batch: Batch, table: StepTable | None) -> Batch:
        """Returns a batch of `to_batch` with the inputs of the algorithm. table: rows of pictures
        and sounds; None without them."""
        return batch

    def only_counted(self, batch: Batch) -> Batch:
        """Returns a batch of `to_batch` with the sequences that the loss counts."""
        return batch

    # Rewards.

    def prepare_rewards(self, reader: DataReader, prompts: list) -> None:
        """Makes the reward runner if the stage scores completions, or evaluates. prompts: those of
        this process, which may have none: the completions of a step are scored on all processes.

        Its workers start with the first call.
        """
        if self.rewards and (self.trains_on_rollouts or reader.evaluation_problems):
            self.runner = reader.reward_runner(self.rewards, prompts)

    # Model.

    @abstractmethod
    def bind(self, graph: Graph) -> None:
        """Makes the trainer of the stage for this model. Its functions compile at their first
        call."""

    def abstract(self) -> State:
        """Returns the shapes and shardings of the state, as the template of a restored checkpoint.

        `policy.params` are the weights of the policy in every state.
        """
        return self.trainer.abstract()

    def executables(self) -> Mapping[str, CompiledCache]:
        """Returns the compiled functions of a step, of reward models and of teachers, by the names
        of their programs in a plan."""
        from rl.accounting.program_names import ProgramName
        from rl.stages.scorers import program_name, teacher_program_name

        reward_models = {
            program_name(source): scorer.executable for source, scorer in self.scorers.items()
        }
        teachers = {
            teacher_program_name(each.source): each.executable for each in self.teacher_scorers
        }
        # A plan makes programs of a stage that has not started.
        tables = self.context.tables if hasattr(self, "context") else None
        towers = {ProgramName.ENCODING: tables.encoder.executable} if tables else {}
        return self.trainer.executables | towers | reward_models | teachers

    @abstractmethod
    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        """Yields the programs of a step, each for the largest shape that it has.

        routes: Batch.routes of one token (the experts that computed it), as shapes; None: the
        generator records none. values: whether the generator computes values of a critic while it
        samples.
        """

    def frozen(self) -> list[Any]:
        """Returns the shapes and shardings of the weights that the stage keeps on the devices and
        does not change: those of other models, and of the policy under an adapter."""
        models = *self.scorers.values(), *self.teachers
        return [*(each.abstract for each in models), self.trainer.base, self.table_shapes]

    @property
    def teachers(self) -> list[Teacher | TeacherScorer]:
        """Returns the teachers with weights of their own: what the update compares the policy with,
        and those that score completions."""
        compared = [self.trainer.teacher] if "teacher" in self.inputs else []
        return [*compared, *self.teacher_scorers]

    def with_options(self, options: StageOptions) -> StageKind:
        """Returns a copy of the stage with another micro-batch size, for a plan. Both share their
        programs."""
        other = copy.copy(self)
        other.trainer = copy.copy(self.trainer)
        other.options = options
        other.trainer.stage = options
        other.trainer.sharing = sharing_of(other, other.trainer.graph)
        return other

    # Run.

    def use(self, config: RunConfig) -> None:
        """Takes the settings of the next steps from this configuration, which differs in keys of
        `rl.config.changes.changeable` only."""
        options = config.stages[self.index]
        if options != self.options and self.trainer is not None:
            self.trainer.set_rates(options)
        self.config = config
        self.options = options

    def start(self, context: Context, restored: State | None = None) -> State:
        """Returns the state before the first step, or `restored`, the arrays of a checkpoint, after
        `restore_curriculum`."""
        self.context = context
        if context.tables is not None:
            from rl.training.media.tables import trains_towers

            trained = self.trains_policy and trains_towers(context.model.graph, self.options)
            context.tables.start_stage(trained)
        if restored is not None:
            if self.trainer is not None:  # `rl rollout` trains nothing
                self.trainer.set_base(context.model.params)
                self.trainer.row_history = RowHistory.from_json(context.progress.packed_rows)
            return restored
        context.progress.start_stage(self.algorithm.adaptive_coefs)
        self.restore_curriculum({})
        return self.trainer.start(context.model.params, self.config.seed + self.index)

    def check_vocabularies(self, params: dict, rows: Sequence[Sequence[Any]]) -> None:
        """Raises ModelError if the policy uses ids that are padding in the vocabulary of a teacher.

        params: of the policy. rows: (ids, mask, ...) of sequences of the data.
        """
        from rl.stages.scorers import check_outside
        from rl.training.batch import padded_batch

        if self.teacher is not None:
            batch = padded_batch(rows, self.config.max_length)
            check_outside(self.teacher, self.teachers, self.trainer.graph, params, batch)

    def check_groups(self) -> None:
        """Raises DataError for files that a step cannot take its groups from."""

    def producer_state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the groups that later steps train on, as values that
        JSON can hold. It is `Progress.producer` when the stage goes on."""
        return {} if self.curriculum is None else {"curriculum": self.curriculum.state()}

    def load_scorers(self, context: Context) -> None:
        """Loads the teachers, and the reward models that the rewards call."""
        from rl.stages.scorers import load_teachers

        span = partial(context.timeline.span, stage=self.name)
        load_teachers(self.teacher, self.teachers, span)
        self.load_reward_models(context, self.trainer.sharing)

    def load_reward_models(self, context: Context, sharing: Sharing | None) -> None:
        """Loads the reward models that the rewards call, for sequences that share beginnings."""
        from rl.stages.scorers import load_scorers

        if self.runner and self.runner.sources:
            with context.timeline.span("loading reward models", stage=self.name):
                self.scorers = load_scorers(
                    self.config, self.runner.sources, context.model.graph.layout, sharing
                )

    @abstractmethod
    def step(self, state: State, n: int) -> tuple[State, dict[str, float]]:
        """Makes step `n`, counted from 1. Returns the new state and the metrics of the step,
        numbers only."""

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Returns how completions are drawn, with `changes`."""
        return sampling_params(self.options.sampling, self.context.stop_ids, **changes)

    def collect(
        self, problems, params: SamplingParams, ids, *, counted: bool = True, again: bool = False
    ) -> Rollouts:
        """Samples completions of `problems` (prompts with their data columns) and starts to compute
        their rewards.

        ids: a prompt id for each, for the random draws. counted, again: as for
        `Context.media_table`.
        """
        from rl.stages.scorers import scoring_functions

        context = self.context
        prompts = None
        table = None
        expanded = [problem.expanded for problem in problems]
        if context.tables is not None:
            table = context.media_table(expanded, counted=counted, again=again)
            prompts = [table.prompt(problem.ids, problem.expanded) for problem in problems]
        return collect(
            Source(
                context.generator,
                self.runner,
                scoring_functions(self.scorers, context.timeline, expanded, table),
                context.timeline.calls,
            ),
            problems,
            params,
            ids,
            context.progress.version,
            prompts,
        )

    def evaluation(self, problems: list) -> Evaluation | None:
        """Returns the evaluation of the policy on these problems, or None if the run has none or
        the stage does not change the policy."""
        options = self.config.evaluation
        if options is None or not self.trains_policy:
            return None
        block = None if self.context.tables is None else self.context.tables.block
        collect = partial(self.collect, counted=False)
        return Evaluation(
            options,
            problems,
            collect,
            self.sampling_params(),
            self._record_evaluation,
            block,
            answer_of(self.rewards) if options.maj else None,
        )

    def _record_evaluation(self, step: int, rollouts: Rollouts, scores: Scores) -> None:
        """Writes the samples of an evaluation, if samples are kept."""
        if self.config.run.samples.every:
            write_samples(self.context.events, self.name, step, rollouts, scores)

    def update(
        self, state: State, batch: Batch, step: int, table: StepTable | None = None, **options: Any
    ) -> tuple[State, dict[str, float]]:
        """Makes the `updates_per_step` updates of a step, each on a mini-batch of equally many
        rows.

        step: its number in the stage, from 1. table: rows of pictures and sounds; None without
        them. options: for `Trainer.update`.

        Returns the state and the mean of each metric over the updates that have it (of
        `first_update_metrics`, the first value): updates without a token in the loss have no metric
        of it. After each update the model holds the new weights.
        """
        import jax

        from rl.training.batch_updates import without_empty

        context = self.context
        updates = self.options.updates_per_step
        rows = len(batch.prompt) // updates
        flops_before = self.trainer.total_flops
        coefs = dict(context.progress.adaptive_coefs)
        all_metrics = []
        with context.timeline.span("updates") as span:
            for u in range(updates):
                mini_batch = batch.rows(slice(u * rows, (u + 1) * rows))
                number = (step - 1) * updates + u
                state, metrics = self._one_update(state, mini_batch, number, table, options)
                all_metrics.append(metrics)
            all_metrics = [without_empty(metrics) for metrics in jax.device_get(all_metrics)]
        flops = self.trainer.total_flops - flops_before
        layout = context.model.graph.layout
        return state, (
            coefs
            | _means(all_metrics, self.algorithm.first_update_metrics)
            | {
                "time/update": span.seconds,
                "perf/step_tokens": float(batch.filled_tokens),
                "batch/trained_share": float(np.count_nonzero(batch.mask))
                / max(1, batch.filled_tokens),
            }
            | self.data_metrics()
            | ({} if context.tables is None else context.tables.metrics())
            | rates("train", flops, batch.filled_tokens, span.seconds, layout)
        )

    def _one_update(
        self,
        state: State,
        mini_batch: Batch,
        number: int,
        table: StepTable | None,
        options: dict[str, Any],
    ) -> tuple[State, dict[str, Any]]:
        """Makes one update, gives the model the new weights and adapts the coefficients. number: of
        the update in its stage, from 0. table, options: as in `update`.

        Returns (state, metrics, on the device where nothing waits for them).
        """
        import jax

        context = self.context
        progress = context.progress
        media = {}
        if table is not None:
            media["table"] = table.table
            media["tower_inputs"] = table.tower_inputs(mini_batch)
        state, metrics = self.trainer.update(
            state,
            mini_batch,
            adaptive_coefs=progress.adaptive_coefs,
            number=number,
            **media,
            **options,
        )
        context.model.params = self.trainer.policy_params(state)
        updates_policy = self.trains_policy and not options.get("critic_only")
        progress.version += updates_policy
        if context.tables is not None:
            context.tables.forget()
        if progress.adaptive_coefs and updates_policy:
            # The coefficients of the next update follow from the metrics of this one.
            metrics = jax.device_get(metrics)
            if mini_batch.mask.any():
                progress.adaptive_coefs = self.algorithm.adapt_after_update(
                    progress.adaptive_coefs, metrics
                )
        return state, metrics

    def learner(self, state: State) -> ParamState:
        """Returns the ParamState of the trained model: the metrics `optim/` describe its
        updates."""
        return state.policy

    # Files.

    def finish(self, state: State, write: Callable[[Path, Callable[[Path], None]], None]) -> None:
        """Writes the results of the stage besides the policy. Releases programs and reward models.

        `write(directory, function)` calls `function` to fill a directory, which appears in one
        step.
        """
        self.trainer = None
        self.scorers = {}
        self.teacher_scorers = []

    def export(self, directory: Path) -> None:
        """Writes the trained weights after the last stage of the run: the policy in Hugging Face
        form, with all parts of the model that training started from."""
        from rl.stages.export.of_run import ExportedRun

        write_policy(ExportedRun.of(self.context), directory)

    def export_at(self, state: State, directory: Path) -> None:
        """Writes what `export` would if the last step of the run were the one with this state."""
        self.export(directory)


def _means(updates: Sequence[Mapping[str, float]], of_first: Container[str]) -> dict[str, float]:
    """Returns the mean of each metric over the updates that have it; its first value where it is
    one of `of_first`."""
    values = defaultdict(list)
    for metrics in updates:
        for name, value in metrics.items():
            values[name].append(value)
    return {
        name: float(each[0] if name in of_first else np.mean(each)) for name, each in values.items()
    }
