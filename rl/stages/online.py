"""A stage that takes groups of trajectories from a producer, waits for their rewards and trains on
them.

P prompts, G trajectories of each; N rows of a batch, one for each segment; T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.accounting.program_names import ProgramName
from rl.cluster.launch import raise_on_all
from rl.errors import Fault
from rl.stages import inputs
from rl.stages.inputs import StepData
from rl.stages.producers import choice
from rl.stages.sampling import batches, checks, filters
from rl.stages.sampling.metrics import generator_flops, sampled_metrics
from rl.stages.sampling.records import write_samples
from rl.stages.sampling.staleness import (
    check_logp_diff,
    logp_diff,
    mean_logp_diff,
    stale_tokens,
    staleness,
)
from rl.stages.sampling.teacher_prompt import TeacherPrompt
from rl.stages.sampling.teacher_rows import check_rows
from rl.stages.sampling.unscored import check_scored
from rl.stages.scorers import abstract_teacher, teacher_scorers
from rl.stages.shapes import abstract_batch, abstract_rows, update_programs
from rl.stages.sharing import sharing_of
from rl.stages.stage import Program, StageKind
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from policy.model import Graph
    from rewards import Scores
    from rl.config.data import DataOptions
    from rl.config.run import RunConfig
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.stages.context import Context
    from rl.stages.producers.interface import Producer
    from rl.training.batch import Batch
    from rl.training.trainer import RunState


NOTED_OVERFLOW = 0.1
"""Share of the tokens of a step that leave the loss for want of room for their ids, above which the
run says so."""


class Stage(StageKind["RunState"]):
    """Updates the policy, and a critic if the algorithm has one, on the groups of a producer: new
    completions of the policy, or recorded ones of an earlier run."""

    trains_on_rollouts = True
    _overflow_noted = False

    def __init__(self, config: RunConfig, index: int):
        super().__init__(config, index)
        self.producer = self.create_producer()

    def create_producer(self) -> Producer:
        """Returns what makes the groups of a step."""
        return choice.create(self)

    @property
    def inputs(self) -> frozenset[str]:
        """Adds `current_logp` if groups may be stale and `exact` or `max_logp_diff` uses it."""
        exact = self.config.generator.exact and self.algorithm.old_logp == "trainer"
        limited = self.options.max_logp_diff is not None and self.producer.versions_of_this_run
        needed = (exact or limited) and not self.producer.on_policy
        return super().inputs | ({"current_logp"} if needed else frozenset())

    @property
    def current_version(self) -> int | None:
        """The version of the current weights, which staleness.py compares with those of tokens;
        None where versions count the updates of an earlier run."""
        return self.context.progress.version if self.producer.versions_of_this_run else None

    @property
    def rows_per_update(self) -> int:
        return super().rows_per_update * self.options.samples_per_prompt

    @property
    def sampled_values(self) -> bool:
        """Whether the generator can compute the critic's values.

        It can if the critic shares the policy's trunk and the current weights sample every
        completion.
        """
        shared = "values" in self.inputs and self.algorithm.critic_trunk == "policy"
        return shared and self.producer.on_policy

    @property
    def samples_for_inputs(self) -> bool:
        return inputs.any_at(self, inputs.SAMPLING)

    def _check_kind(self) -> Iterator[Fault]:
        yield from checks.faults(self)
        yield from self.producer.faults()
        yield from self._check_no_capacity()
        yield from self._check_room()

    def remarks(self) -> Iterator[str]:
        """Adds the settings that have no effect with the producer."""
        yield from super().remarks()
        yield from self.producer.remarks()

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        return reader.problems(source, self.options)

    def prepare(self, reader: DataReader) -> None:
        self.read_rows(reader)
        self.prepare_rewards(reader, list(self.rows.own))
        reader.check_teacher(self.teacher, self.options.sampling.stop_token_ids)
        self._prepare_teacher(reader)
        reader.check_words(self.options.sampling.bad_words, f"stages.{self.index}.sampling")

    def _prepare_teacher(self, reader: DataReader) -> None:
        """Makes the prompt that a teacher reads. Raises DataError for rows that no teacher scores,
        or whose prompt it cannot read."""
        options = self.teacher
        if options is None:
            return
        if options.prompt is not None:
            self.teacher_prompt = TeacherPrompt(options.prompt, reader.prompt_ids)
        room = self.config.max_length - self.options.sampling.max_new_tokens
        own = list(self.rows.own)
        raise_on_all(partial(check_rows, options, self.teacher_prompt, own, room))

    def problems(self) -> list:
        return list(self.rows.own) if self.calls_generator else []

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        compared = self.teacher if "teacher" in self.inputs else None
        self.trainer = Trainer(
            graph,
            self.options,
            self.algorithm,
            self.config.seed,
            state=self._state,
            temperature=self.options.sampling.temperature,
            returns_tokens=True,
            teacher=abstract_teacher(self.config, compared, self.algorithm, graph.layout),
        )
        self.trainer.row_length = self.row_length
        self.trainer.sharing = sharing_of(self, graph)
        if "teacher_logp" in self.inputs:
            temperature = self.options.sampling.temperature
            self.teacher_scorers = teacher_scorers(self.config, self.teacher, temperature, graph)

    @property
    def _state(self) -> set[str]:
        """Returns the parts of a RunState besides the policy: what inputs read, and a teacher."""
        own = self.teacher is not None and self.teacher.source == "reference"
        return inputs.state_of(self.inputs) | ({"reference"} if own else set())

    def programs(self, routes: dict | None, values: bool) -> Iterator[Program]:
        state = self.abstract()
        updates = self.options.updates_per_step
        routes = routes if self.options.router_replay else None
        names = ("sampler_logp", "advantages", *inputs.fields(self))
        batch = self._with_old_logp(
            abstract_batch(abstract_rows(self, updates).shape, routes, *names)
        )
        if self.algorithm.critic_warmup and self.trainer.value_model.shared:
            # A value head has its own update only during the critic's warm-up, when the policy does
            # not change.
            yield from update_programs(self, state, batch, times=0, critic_only=True)
        yield from update_programs(self, state, batch, updates)
        for each in inputs.programs(self, state, routes):
            sampled = each.kind == ProgramName.VALUES and values and self.sampled_values
            if not sampled or self.algorithm.bootstrap_truncated:
                yield each

    def check_groups(self) -> None:
        self.producer.check_files()

    @property
    def calls_generator(self) -> bool:
        return self.producer.calls_generator or self.samples_for_inputs

    def start(self, context: Context, restored: RunState | None = None) -> RunState:
        state = super().start(context, restored)
        self.producer.restore(context.progress.producer)
        if self.teacher is not None and restored is None:
            first = self.rows.take(range(min(self.rows.total, self.options.prompts_per_step)))
            rows = [(problem.ids, [1] * len(problem.ids)) for problem in first]
            self.check_vocabularies(self.trainer.policy_params(state), rows)
        return state

    def producer_state(self) -> dict[str, Any]:
        # First the producer: its state has the curriculum observe the last rewards.
        producer = self.producer.state()
        return producer | super().producer_state()

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Takes groups from the producer and trains on them."""
        data = StepData(state, flops_before=self.trainer.total_flops)
        self._sample(data)
        return self._train(data, n)

    def _sample(self, data: StepData) -> None:
        """Takes the groups of the step, and samples what inputs of the algorithm need besides. The
        rewards may be pending afterwards."""
        context = self.context
        if self.sampled_values and context.generator.options.record_values:
            from policy.modes import VALUE_HEAD

            critic = data.state.critic
            assert critic is not None  # `sampled_values` are of one
            context.generator.set_value_head(critic.params[VALUE_HEAD])
        weights = context.resharded() if self.calls_generator else nullcontext({})
        with weights as metrics, context.timeline.span("sampling"):
            data.rollouts = self.take_groups()
            inputs.provide(self, data, inputs.SAMPLING)
        data.metrics |= metrics

    def take_groups(self) -> Rollouts:
        """Returns the groups of the next step from the producer. Raises ValueError for another
        number of groups than a step has."""
        count = self.options.prompts_per_step
        rollouts = self.producer.take(count)
        if len(rollouts.groups) != count:
            raise ValueError(
                f"{type(self.producer).__name__}.take returned {len(rollouts.groups)} groups, and "
                f"the step has {count} (prompts_per_step)"
            )
        return rollouts

    def wait_for_scores(self, rollouts: Rollouts) -> tuple[Scores, dict[str, float]]:
        """Waits for the scores of the groups of a step. Returns (scores, metrics of the wait).

        Raises RewardStop after `rewards.unscored_steps` steps in a row without one score, if the
        algorithm learns from them.
        """
        with self.context.timeline.span("waiting for rewards") as span:
            scores = rollouts.scores.result()
        if self.rewards is None:
            return scores, {}
        if self.algorithm.needs_rewards:
            check_scored(self, scores)
        return scores, {"time/reward": rollouts.waiting + span.seconds}

    def _train(self, data: StepData, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes `updates_per_step` updates, each on complete groups, and writes the samples.

        Returns the new state and the metrics of the step.
        """
        self._make_batch(data)
        self._add_inputs(data)
        self._add_advantages(data)
        state, updated = self._update(data, n)
        # Stale tokens would add the drift of the policy to this mean. Where there are any,
        # `log_probabilities` has checked the fresh tokens.
        if not data.stale:
            check_logp_diff(self.options.max_logp_diff, updated.get("sampler/logp_diff_mean"))
        state = self._renew_reference(state, n)
        self._write_samples(data, n)
        return state, self._metrics(data) | updated

    def _make_batch(self, data: StepData) -> None:
        """Puts the segments of the trajectories into rows for the device."""
        rollouts = data.rollouts
        assert rollouts is not None
        with self.context.timeline.span("batch"):
            data.batch = batches.to_batch(
                rollouts,
                self.config.max_length,
                replay=self.options.router_replay,
                values=self.sampled_values,
            )
            if self.max_kept:
                self._add_kept_ids(data, rollouts)
        if self.algorithm.mask_truncated:
            ended = [not trajectory.truncated for trajectory in rollouts.trajectories]
            ended_N = batches.by_row(rollouts, np.asarray(ended, np.float32))
            data.batch = data.batch.replace(mask=data.batch.mask * ended_N[:, None])
        self._check_rows(rollouts)
        if self.context.tables is not None:
            expanded = [group.problem.expanded for group in rollouts.groups]
            data.table = self.context.media_table(expanded, again=True)
            data.batch = data.table.add(data.batch, batches.expanded_at(rollouts))

    def _check_rows(self, rollouts: Rollouts) -> None:
        """Raises ValueError for trajectories of several rows where losses or mini-batches count
        rows."""
        if self.options.updates_per_step > 1:
            batches.one_row_each(rollouts, "updates_per_step above 1")
        if getattr(self.algorithm, "aggregation", None) != "token":
            batches.one_row_each(rollouts, "a loss that counts sequences")

    def _add_kept_ids(self, data: StepData, rollouts: Rollouts) -> None:
        """Adds the ids that filters of the sampler kept for each token."""
        segments = [row.segment for row in rollouts.rows]
        vocabulary = self.trainer.graph.config.vocab_size
        data.batch, metrics = filters.with_kept(data.batch, segments, self.max_kept, vocabulary)
        data.metrics |= metrics
        self._note_overflow(metrics.get("sampler/kept_overflow", 0.0))

    def _note_overflow(self, share: float) -> None:
        """Shows, once a stage, that many tokens leave the loss because filters leave more ids than
        are recorded."""
        if share > NOTED_OVERFLOW and not self._overflow_noted:
            self._overflow_noted = True
            self.context.events.note(
                f"{self.name}: the filters leave {share:.0%} of the tokens more than "
                f"{self.max_kept} ids each, and these tokens leave the loss; add sampling.top_k, "
                "or raise sampling.max_kept (docs/sampling.md)"
            )

    def _add_inputs(self, data: StepData) -> None:
        """Adds the inputs from policy, reference and critic, waits for the rewards, and adds the
        inputs from these."""
        assert data.rollouts is not None
        self.log_probabilities(data)
        scores, waited = self.wait_for_scores(data.rollouts)
        data.scores = scores
        data.metrics |= waited
        if self.algorithm.needs_rewards:
            unscored_N = batches.by_row(data.rollouts, ~np.isfinite(scores.total))
            data.batch = data.batch.without_rows(unscored_N)
        data.rewards = scores.total.reshape(
            len(data.rollouts.groups), self.options.samples_per_prompt
        )
        inputs.provide(self, data, inputs.REWARDS)
        data.stale, metrics = staleness(data.batch, self.current_version)
        data.metrics |= metrics

    def log_probabilities(self, data: StepData) -> None:
        """Adds the old, reference and critic outputs that the algorithm asks for.

        Raises ModelError beyond `max_logp_diff`.
        """
        inputs.run_model_passes(self, data)
        current = data.current_policy_batch
        if current is not None:
            difference = mean_logp_diff(current, self.current_version)
            check_logp_diff(self.options.max_logp_diff, difference)
        data.batch = self._with_old_logp(data.batch, current)

    def _with_old_logp(self, batch: Batch, current: Batch | None = None) -> Batch:
        """Returns the batch with the old log-probabilities of the ratio.

        The algorithm selects them. Under `exact` they are the generator's, but for stale tokens:
        there an algorithm that takes the trainer's (`old_logp`) gets the ones of the current
        policy. current: `StepData.current_policy_batch`.
        """
        if not self.config.generator.exact:
            return batch.replace(old_logp=self.algorithm.select_old_logp(batch))
        old_logp = batch.sampler_logp
        if current is not None:
            stale_NT = stale_tokens(batch, self.current_version)
            old_logp = np.where(stale_NT, self.algorithm.select_old_logp(current), old_logp)
        return batch.replace(old_logp=old_logp)

    def _add_advantages(self, data: StepData) -> None:
        """Adds `advantages`, float[N] or float[N,T], and `returns` to the batch, and each
        trajectory's mean to the data."""
        batch = data.batch
        rewards = data.rewards
        assert data.rollouts is not None and rewards is not None
        algorithm = self.algorithm.with_coefs(self.context.progress.adaptive_coefs)
        lengths = np.asarray([trajectory.length for trajectory in data.rollouts.trajectories])
        lengths = lengths.reshape(rewards.shape[:2])
        with self.context.timeline.span("advantages"):
            advantages, returns, metrics = algorithm.estimate(
                rewards, lengths, batch, **data.arguments
            )
        data.advantages = advantages
        if advantages.ndim == 1:
            advantages = batches.by_row(data.rollouts, advantages)
        else:
            batches.one_row_each(data.rollouts, "an algorithm with advantages of tokens")
            counts = np.maximum((batch.mask != 0).sum(axis=1), 1)
            data.advantages = advantages.sum(axis=1) / counts
        returns = batch.returns if returns is None else returns.astype(np.float32)
        data.batch = batch.replace(advantages=advantages.astype(np.float32), returns=returns)
        data.metrics |= metrics

    def _update(self, data: StepData, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes the updates of the step and adapts the coefficients. The critic's warm-up updates
        the critic alone."""
        batch = data.batch
        progress = self.context.progress
        version = self.current_version
        critic_only = data.state.critic is not None and n <= self.algorithm.critic_warmup
        outputs = []
        on_tokens = outputs.append if self.config.run.samples.keeps_step(n) else None
        state, updated = self.update(
            data.state, batch, n, data.table, critic_only=critic_only, on_tokens=on_tokens
        )
        parts = [each.on_host() for each in outputs]
        data.token_outputs = _concatenated(parts)
        if parts:
            first_logp = parts[0]["logp"]
            data.token_outputs["logp_diff"] = logp_diff(
                batch, data.trainer_logp, first_logp, version
            )
        if not critic_only and batch.mask.any():  # otherwise no update changed the policy
            coefs = self.algorithm.adapt_after_step(
                progress.adaptive_coefs, data.metrics, len(batch.mask)
            )
            progress.adaptive_coefs = coefs
        return state, updated

    def _renew_reference(self, state: RunState, n: int) -> RunState:
        """Returns the state, every `reference_every` steps with the policy mixed into the reference
        model."""
        every = self.algorithm.reference_every
        if not every or n % every:
            return state
        with self.context.timeline.span("new reference"):
            return self.trainer.renew_reference(state, self.algorithm.reference_mix)

    def _write_samples(self, data: StepData, n: int) -> None:
        """Writes the trajectories of the step, if `run.samples` keeps them."""
        assert data.rollouts is not None and data.scores is not None
        if not self.config.run.samples.keeps_step(n):
            return
        with self.context.timeline.span("writing samples"):
            write_samples(
                self.context.events,
                self.name,
                n,
                data.rollouts,
                data.scores,
                data.advantages,
                data.batch,
                data.token_outputs,
            )

    def _metrics(self, data: StepData) -> dict[str, float]:
        """Returns the metrics of the step, without those of its updates."""
        rollouts = data.rollouts
        advantages = data.advantages
        assert rollouts is not None and data.scores is not None and advantages is not None
        context = self.context
        operations = self.trainer.flops
        layout = context.model.graph.layout
        flops = generator_flops(rollouts, operations)
        flops += self.trainer.total_flops - data.flops_before
        statistics = {
            f"advantage/{name}": float(getattr(advantages, name)())
            for name in ("mean", "std", "min", "max")
        }
        drafted = self.config.generator.speculative > 0
        return (
            sampled_metrics(
                rollouts, data.scores, context.generator, operations, layout, drafted=drafted
            )
            | data.metrics
            | statistics
            | {"perf/step_tflop": flops / 1e12}
        )


def _concatenated(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the rows of all updates of a step, by name."""
    return {
        name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())
    }
