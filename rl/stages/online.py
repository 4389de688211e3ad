"""A stage that takes groups of trajectories from a producer, gets their rewards and trains on them.

P prompts, G trajectories of each; N rows of a batch, one for each segment; T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.accounting.flops import memory_share, rates
from rl.accounting.program_names import ProgramName
from rl.errors import Fault
from rl.stages import inputs
from rl.stages.inputs import StepData
from rl.stages.sampling import by_source, filters, rollouts
from rl.stages.sampling.dynamic import DynamicSampling
from rl.stages.sampling.recorded import Recorded
from rl.stages.sampling.staleness import check_difference, difference, gap, stale_tokens, staleness
from rl.stages.sampling.synchronous import Synchronous
from rl.stages.sampling.taught import Taught
from rl.stages.sampling.unscored import check_scored
from rl.stages.scorers import abstract_teacher
from rl.stages.shapes import abstract_batch, abstract_rows, update_programs
from rl.stages.sharing import sharing_of
from rl.stages.stage import Program, StageKind
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.config.data import DataOptions
    from rl.data.reader import DataReader
    from rl.data.shard import Shard
    from rl.stages.context import Context
    from rl.stages.sampling.producer import Producer
    from rl.training.batch import Batch
    from rl.training.trainer import RunState


# Share of the tokens of a step that leave the loss for want of room for their ids, above which the
# run says so.
MANY = 0.1


class Stage(StageKind):
    """Updates the policy, and a critic if the algorithm has one, on completions that the policy
    samples."""

    samples_completions = True
    producer: Producer
    _overflow_noted = False

    @property
    def inputs(self) -> frozenset[str]:
        """Adds `current_logp` if groups may be stale and `exact` or `max_logp_diff` uses it."""
        exact = self.config.generator.exact and self.algorithm.old_logp == "trainer"
        limited = self.options.max_logp_diff is not None and self.options.rollouts is None
        compared = exact or limited
        return super().inputs | (
            {"current_logp"} if compared and not self.create_producer().on_policy else frozenset()
        )

    @property
    def current_version(self) -> int | None:
        """The version of the current weights, which staleness.py compares with those of tokens;
        None with `rollouts`, where versions count the updates of the earlier run."""
        return None if self.options.rollouts is not None else self.context.progress.version

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
        return shared and self.create_producer().on_policy

    def _check_kind(self) -> Iterator[Fault]:
        stage = self.options
        name = self.options.algorithm.name
        if not self.rewards:
            yield Fault(
                f"{name} needs rewards, here or for all stages (`rewards`)",
                key=(*self.path, "rewards"),
            )
        if stage.samples_per_prompt == 1 and (
            self.algorithm.dynamic_batches or _compares_groups(self.algorithm)
        ):
            yield Fault(
                f"{name} compares the completions of a prompt, and a single one teaches nothing; "
                "use 2 or more",
                key=(*self.path, "samples_per_prompt"),
            )
        if stage.sampling.temperature == 0:
            yield Fault(
                "0 is greedy: nothing to learn from equal completions",
                key=(*self.path, "sampling", "temperature"),
            )
        if self.max_kept and stage.sampling.top_k > stage.sampling.max_kept:
            yield Fault(
                f"{stage.sampling.max_kept} ids of a token are recorded, but top_k leaves "
                f"{stage.sampling.top_k}, and such "
                "a token leaves the loss; raise max_kept to at least top_k",
                key=(*self.path, "sampling", "max_kept"),
            )
        if stage.rollouts is not None:
            yield from self._check_recorded()
        yield from self._check_no_capacity()
        yield from self._check_room()

    def _check_recorded(self) -> Iterator[Fault]:
        """Yields the faults of a stage that trains on the samples of an earlier run."""
        key = (*self.path, "rollouts")
        if self.options.curriculum is not None:
            yield Fault("the samples say which rows a step takes; leave out curriculum", key=key)
        if self.options.steps is None:
            yield Fault("samples are recorded by step: set `steps`, not `epochs`", key=key)
        if self.max_kept:
            yield Fault(
                "samples do not say which ids filters left, over which the loss would be; set "
                "sampling.filters=ignore",
                key=key,
            )
        if inputs.any_at(self, inputs.SAMPLING):
            yield Fault(
                f"{self.options.algorithm.name} samples greedy completions of the prompts as well, "
                "and samples lack the long columns that their rewards may need; leave out rollouts, "
                "or use another algorithm",
                key=key,
            )
        if self.options.router_replay:
            yield Fault(
                "samples do not say which experts computed them; leave out router_replay", key=key
            )

    def remarks(self) -> Iterator[str]:
        """Adds the settings that have no effect with `rollouts`."""
        yield from super().remarks()
        if self.options.rollouts is None:
            return
        place = f"stages.{self.index}"
        if self.algorithm.dynamic_batches:
            yield (
                f"{place}.algorithm.dynamic_batches: no effect with rollouts: the groups are those "
                "that the earlier run trained on"
            )
        if self.options.max_logp_diff is not None:
            yield (
                f"{place}.max_logp_diff: no effect with rollouts: other weights than the current "
                "ones may have drawn the tokens"
            )

    def read(self, reader: DataReader, source: DataOptions, held_out: bool = False) -> Shard:
        return reader.problems(source, self.options)

    def prepare(self, reader: DataReader) -> None:
        self.read_rows(reader)
        self.prepare_rewards(reader, list(self.rows.own))
        reader.check_teacher(self.teacher, self.options.sampling.stop_token_ids)
        reader.check_words(self.options.sampling.bad_words, f"stages.{self.index}.sampling")

    def prompts(self) -> list:
        return list(self.rows.own) if self.generates else []

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        how: dict[str, Any] = {
            "temperature": self.options.sampling.temperature,
            "returns_tokens": True,
        }
        how["teacher"] = abstract_teacher(self.config, self.teacher, self.algorithm, graph.layout)
        state = inputs.state_of(self.inputs)
        self.trainer = Trainer(
            graph, self.options, self.algorithm, self.config.seed, state=state, **how
        )
        self.trainer.sharing = sharing_of(self, graph)

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

    def create_producer(self) -> Producer:
        """Returns what makes the groups of a step. `start` restores its state."""
        if self.options.rollouts is not None:
            return Recorded(self, self.options.rollouts)
        producer: Producer = Synchronous(self)
        if self.options.curriculum is not None:
            producer = Taught(producer, self)
        if self.algorithm.dynamic_batches:
            return DynamicSampling(producer, self)
        return producer

    def check_groups(self) -> None:
        self.create_producer().check()

    @property
    def generates(self) -> bool:
        return self.create_producer().generates or inputs.any_at(self, inputs.SAMPLING)

    def start(self, context: Context, restored: RunState | None = None) -> RunState:
        state = super().start(context, restored)
        self.producer = self.create_producer()
        self.producer.restore(context.progress.producer)
        return state

    def producer_state(self) -> dict[str, Any]:
        return self.producer.state() | super().producer_state()

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Takes groups from the producer and trains on them."""
        data = StepData(state, flops_before=self.trainer.total_flops)
        self._take(data)
        return self._train(data, n)

    def _take(self, data: StepData) -> None:
        """Takes the groups of the step. Their rewards may still be computed."""
        context = self.context
        if self.sampled_values and context.generator.options.record_values:
            from policy.modes import VALUE_HEAD

            context.generator.set_value_head(data.state.critic.params[VALUE_HEAD])
        weights = context.resharded() if self.generates else contextlib.nullcontext({})
        with weights as metrics, context.timeline.span("sampling"):
            data.rollouts = self._next_groups(self.options.prompts_per_step)
            data.metrics |= data.rollouts.metrics
            inputs.provide(self, data, inputs.SAMPLING)
        data.metrics |= metrics

    def _next_groups(self, count: int) -> Rollouts:
        """Returns the groups of the step. Raises ValueError for another number of groups."""
        taken = self.producer.take(count)
        if len(taken.groups) != count:
            raise ValueError(
                f"{type(self.producer).__name__}.take returned {len(taken.groups)} groups, and the "
                f"step has {count} (prompts_per_step)"
            )
        return taken

    def _train(self, data: StepData, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes `updates_per_step` updates, each on complete groups, and writes the samples.

        Returns the new state and the metrics of the step.
        """
        self._make_batch(data)
        self._add_inputs(data)
        self._add_advantages(data)
        state, updated = self._update(data, n)
        # With stale tokens the mean includes changes of the policy; `log_probabilities` has then
        # checked the others.
        if not data.stale:
            check_difference(self.options.max_logp_diff, updated.get("sampler/logp_diff_mean"))
        state = self._renew_reference(state, n)
        self._write_samples(data, n)
        return state, self._metrics(data) | updated

    def _make_batch(self, data: StepData) -> None:
        """Puts the completions into rows for the device."""
        assert data.rollouts is not None
        context = self.context
        length = self.config.max_length
        replay = self.options.router_replay
        values = self.sampled_values
        with context.timeline.span("batch"):
            batch = rollouts.to_batch(data.rollouts, length, replay=replay, values=values)
            if self.max_kept:
                segments = [row.segment for row in data.rollouts.rows]
                vocabulary = self.trainer.graph.config.vocab_size
                batch, metrics = filters.with_kept(batch, segments, self.max_kept, vocabulary)
                data.metrics |= metrics
                self._note_overflow(metrics.get("sampler/kept_overflow", 0.0))
        if self.algorithm.mask_truncated:
            complete_N = [not trajectory.truncated for trajectory in data.rollouts.trajectories]
            complete_N = rollouts.by_row(data.rollouts, np.asarray(complete_N, np.float32))
            batch = batch.replace(mask=batch.mask * complete_N[:, None])
        self._check_rows(data.rollouts)
        data.batch = batch
        if context.tables is not None:
            expanded = [group.problem.expanded for group in data.rollouts.groups]
            data.table = context.media_table(expanded, again=True)
            data.batch = data.table.add(batch, rollouts.expanded_at(data.rollouts))

    def _check_rows(self, sampled: Rollouts) -> None:
        """Raises ValueError for trajectories of several rows where losses or mini-batches count
        rows."""
        if self.options.updates_per_step > 1:
            rollouts.one_row_each(sampled, "updates_per_step above 1")
        if getattr(self.algorithm, "aggregation", None) != "token":
            rollouts.one_row_each(sampled, "a loss that counts sequences")

    def _note_overflow(self, share: float) -> None:
        """Shows, once a stage, that many tokens leave the loss because filters leave more ids than
        are recorded."""
        if share > MANY and not self._overflow_noted:
            self._overflow_noted = True
            self.context.events.note(
                f"{self.name}: the filters leave {share:.0%} of the tokens more than "
                f"{self.max_kept} ids each, and these tokens leave the loss; add sampling.top_k, "
                "or raise sampling.max_kept (docs/sampling.md)"
            )

    def _add_inputs(self, data: StepData) -> None:
        """Adds the inputs from policy, reference and critic, waits for the rewards, and adds the
        inputs from these."""
        context = self.context
        assert data.rollouts is not None
        self.log_probabilities(data)
        with context.timeline.span("waiting for rewards") as span:
            data.scores = scores = data.rollouts.scores.result()
        data.metrics["time/reward"] = span.seconds
        check_scored(self, scores)
        unscored_N = rollouts.by_row(data.rollouts, ~np.isfinite(scores.total))
        data.batch = data.batch.without(unscored_N)
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
        if data.current is not None:
            apart = difference(data.current, self.current_version)
            check_difference(self.options.max_logp_diff, apart)
        data.batch = self._with_old_logp(data.batch, data.current)

    def _with_old_logp(self, batch: Batch, current: Batch | None = None) -> Batch:
        """Returns the batch with the old log-probabilities of the ratio.

        Under `exact` they are the generator's log-probabilities; stale tokens take the ones in
        `current` instead.
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
            advantages = rollouts.by_row(data.rollouts, advantages)
        else:
            rollouts.one_row_each(data.rollouts, "an algorithm with advantages of tokens")
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
            data.token_outputs["gap"] = gap(batch, data.trainer_logp, first_logp, version)
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
        sampled = data.rollouts
        assert sampled is not None and data.scores is not None
        if not self.config.run.samples.keeps_step(n):
            return
        with self.context.timeline.span("writing samples"):
            lines = rollouts.records(sampled, data.scores, self.name, n, data.advantages)
            tokens = rollouts.token_records(sampled, data.batch, data.token_outputs)
            self.context.events.samples(lines, tokens, rollouts.references(sampled))

    def _metrics(self, data: StepData) -> dict[str, float]:
        """Returns the metrics of the step, without those of its updates."""
        sampled = data.rollouts
        advantages = data.advantages
        context = self.context
        assert sampled is not None and data.scores is not None and advantages is not None
        metrics = data.metrics
        flops = rollouts.operations(sampled, self.trainer.flops)
        if sampled.counts is not None:
            layout = context.model.graph.layout
            read = sampled.counts["steps"] * context.generator.weight_bytes
            metrics |= rates("sample", flops, sampled.counts["tokens"], sampled.seconds, layout)
            metrics |= memory_share(read, sampled.seconds, layout)
        metrics |= {
            f"advantage/{name}": float(getattr(advantages, name)())
            for name in ("mean", "std", "min", "max")
        }
        flops += self.trainer.total_flops - data.flops_before
        metrics["perf/step_tflop"] = flops / 1e12
        drafted = self.config.generator.speculative > 0
        metrics |= by_source.of_rollouts(sampled, data.scores)
        return rollouts.metrics(sampled, data.scores, drafted=drafted) | metrics


def _compares_groups(algorithm: Any) -> bool:
    """Tells whether the advantage of the only completion of a prompt is 0."""
    rewards_PG = np.array([[1.0], [0.0]])
    ones_PG = np.ones((2, 1), int)
    known = {"token_kl": np.zeros((2, 1, 1)), "mask": np.ones((2, 1, 1))}
    try:
        takes = inspect.signature(algorithm.advantages).parameters
        inputs = {name: value for name, value in known.items() if name in takes}
        advantages = algorithm.advantages(rewards_PG, ones_PG, **inputs)
    except (AttributeError, TypeError, ValueError):  # it needs a critic or greedy completions
        return False
    return not np.any(advantages)


def _concatenated(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the rows of all updates of a step, by name."""
    return {
        name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())
    }
