"""A stage that samples completions, gets their rewards and trains on them.

P prompts, G completions of each, N = P G in all, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.accounting.flops import memory_share, rates
from rl.errors import Fault, ModelError, RewardStop
from rl.stages import inputs
from rl.stages.inputs import StepData
from rl.stages.sampling import filters, rollouts
from rl.stages.sampling.dynamic import DynamicSampling, ScoredGroup
from rl.stages.scorers import bound_teacher
from rl.stages.shapes import abstract_batch, abstract_rows, policy_update, update_program
from rl.stages.sharing import sharing_of
from rl.stages.stage import Program, StageKind
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from policy.model import Graph
    from rewards import Scores
    from rl.data.reader import DataReader
    from rl.stages.context import Context
    from rl.training.batch import Batch
    from rl.training.trainer import RunState


# Share of the tokens of a step that leave the loss for want of room for their ids, above which the
# run says so.
MANY = 0.1


class Stage(StageKind):
    """Updates the policy, and a critic if the algorithm has one, on completions that the policy
    samples."""

    samples_completions = True
    dynamic: DynamicSampling | None
    _overflow_noted = False

    @property
    def inputs(self) -> frozenset[str]:
        """Adds `current_logp` if groups may be stale and `exact` or `max_logp_diff` uses it."""
        exact = self.config.generator.exact and self.algorithm.old_logp == "trainer"
        compared = exact or self.options.max_logp_diff is not None
        return super().inputs | (
            {"current_logp"} if self.algorithm.dynamic_batches and compared else frozenset()
        )

    @property
    def rows_per_update(self) -> int:
        return super().rows_per_update * self.options.samples_per_prompt

    @property
    def sampled_values(self) -> bool:
        """Whether the generator can compute the critic's values.

        It can if the critic shares the policy's trunk and the current weights sample every
        completion.
        """
        on_policy = "values" in self.inputs and self.algorithm.critic_trunk == "policy"
        return on_policy and not self.algorithm.dynamic_batches

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
        yield from self._check_no_capacity()
        yield from self._check_room()

    def prepare(self, reader: DataReader) -> None:
        self.rows = reader.problems(self.data, self.options)
        self.prepare_rewards(reader, self.prompts())
        reader.check_teacher(self.teacher, self.options.sampling.stop_token_ids)
        reader.check_words(self.options.sampling.bad_words, f"stages.{self.index}.sampling")

    def prompts(self) -> list:
        return list(self.rows.own)

    def bind(self, graph: Graph) -> None:
        from rl.training.trainer import Trainer

        how: dict[str, Any] = {
            "temperature": self.options.sampling.temperature,
            "returns_tokens": True,
        }
        how["teacher"] = bound_teacher(self.config, self.teacher, self.algorithm, graph.layout)
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
        policy = state.policy
        critic = state.critic
        trainer = self.trainer
        value_head = critic if trainer.companion == "critic" else None
        if critic is not None and (value_head is None or self.algorithm.critic_warmup):
            trunk = trainer.value_model.extra_params(policy.params)
            # A value head has its own update only during the critic's warm-up, when the policy does
            # not change.
            times = updates if value_head is None else 0
            yield update_program(
                self, "update of the critic", batch, critic, (trunk, None), (critic, trunk), times
            )
        yield policy_update(self, batch, state, updates)
        for each in inputs.programs(self, state, routes):
            sampled = each.kind == inputs.VALUES and values and self.sampled_values
            if not sampled or self.algorithm.bootstrap_truncated:
                yield each

    def step(self, state: RunState, n: int) -> tuple[RunState, dict[str, float]]:
        """Samples groups, gets their rewards, and makes `updates_per_step` updates, each on
        complete groups."""
        data = StepData(state)
        flops_before = self.trainer.total_flops
        self._sample(data)
        self._make_batch(data)
        self._add_inputs(data)
        advantages = self._advantages(data)
        state, updated = self._update(data, n)
        # else the mean says nothing; `log_probabilities` has checked the tokens that are not stale
        if not data.stale:
            _check_difference(self.options.max_logp_diff, updated.get("sampler/logp_diff_mean"))
        state = self._renew_reference(state, n)
        return state, self._log(data, advantages, updated, n, flops_before)

    def start(self, context: Context, restored: RunState | None = None) -> RunState:
        state = super().start(context, restored)
        algorithm = self.algorithm
        self.dynamic = None
        if algorithm.dynamic_batches:
            self.dynamic = DynamicSampling(
                algorithm.dynamic_batches, algorithm.dynamic_reward, self.runner
            )
            carried = context.progress.producer.get("carried", [])
            self.dynamic.carried = [ScoredGroup.from_json(each, self.rows.take) for each in carried]
        return state

    def producer_state(self) -> dict[str, Any]:
        if self.dynamic is None:
            return {}
        return {"carried": [group.to_json() for group in self.dynamic.carried]}

    def _sample(self, data: StepData) -> None:
        """Samples completions of the step's prompts. Rewards are computed at the same time."""
        context = self.context
        if self.sampled_values and context.generator.options.record_values:
            from policy.modes import VALUE_HEAD

            context.generator.set_value_head(data.state.critic.params[VALUE_HEAD])
        with context.resharded() as metrics, context.timeline.span("sampling"):
            data.rollouts, group_metrics = self._groups()
            data.metrics |= group_metrics
            inputs.provide(self, data, inputs.SAMPLING)
        data.metrics |= metrics

    def _groups(self) -> tuple[Rollouts, dict[str, float]]:
        """Returns the groups of a step, and metrics of how they were chosen."""
        if self.dynamic is None:
            return self._sample_groups(), {}
        rollouts, metrics = self.dynamic.fill(self.options.prompts_per_step, self._sample_groups)
        if self.options.router_replay:
            # Routes are large: a checkpoint does not hold them, so groups that are left over are
            # dropped.
            self.dynamic.carried = []
        return rollouts, metrics

    def _sample_groups(self) -> Rollouts:
        """Draws the next prompts of the data and completes them."""
        progress = self.context.progress
        params = self.sampling_params(n=self.options.samples_per_prompt)
        rows = self.draw_examples(self.examples)  # indices in the data
        # Numbers for the random draws. They go on through the run: a prompt that comes again is
        # drawn differently.
        ids = range(progress.next_prompt_id, progress.next_prompt_id + len(rows))
        progress.next_prompt_id += len(rows)
        with self.context.timeline.span("data"):
            problems = self.rows.take(rows)
        rollouts = self.collect(problems, params, ids)
        groups = [replace(group, row=row) for group, row in zip(rollouts.groups, rows, strict=True)]
        return replace(rollouts, groups=groups)

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
        if context.media is not None:
            documents = [group.problem.media for group in data.rollouts.groups]
            data.table = context.media_table(documents, again=True)
            data.batch = data.table.add(batch, rollouts.documents(data.rollouts))

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
        _check_scored(self, scores)
        unscored_N = rollouts.by_row(data.rollouts, ~np.isfinite(scores.total))
        data.batch = data.batch.without(unscored_N)
        data.rewards = scores.total.reshape(
            len(data.rollouts.groups), self.options.samples_per_prompt
        )
        inputs.provide(self, data, inputs.REWARDS)
        data.stale, staleness = _staleness(data.batch, context.progress.version)
        data.metrics |= staleness

    def log_probabilities(self, data: StepData) -> None:
        """Adds the old, reference and critic outputs that the algorithm asks for.

        Raises ModelError beyond `max_logp_diff`.
        """
        inputs.run_model_passes(self, data)
        if data.current is not None:
            _check_difference(
                self.options.max_logp_diff, _difference(data.current, self.context.progress.version)
            )
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
            stale_NT = inputs.stale_tokens(batch, self.context.progress.version)
            old_logp = np.where(stale_NT, self.algorithm.select_old_logp(current), old_logp)
        return batch.replace(old_logp=old_logp)

    def _advantages(self, data: StepData) -> np.ndarray:
        """Adds `advantages`, float[N] or float[N,T], and `returns` to the batch. Returns each
        trajectory's mean."""
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
        per_sample = advantages
        if advantages.ndim == 1:
            advantages = rollouts.by_row(data.rollouts, advantages)
        else:
            rollouts.one_row_each(data.rollouts, "an algorithm with advantages of tokens")
            per_sample = advantages.sum(axis=1) / np.maximum((batch.mask != 0).sum(axis=1), 1)
        returns = batch.returns if returns is None else returns.astype(np.float32)
        data.batch = batch.replace(advantages=advantages.astype(np.float32), returns=returns)
        data.metrics |= metrics
        return per_sample

    def _update(self, data: StepData, n: int) -> tuple[RunState, dict[str, float]]:
        """Makes the updates of the step and adapts the coefficients. The critic's warm-up updates
        the critic alone."""
        batch = data.batch
        progress = self.context.progress
        version = self.context.progress.version
        critic_only = data.state.critic is not None and n <= self.algorithm.critic_warmup
        outputs = []
        on_tokens = outputs.append if self.config.run.samples.keeps_step(n) else None
        state, updated = self.update(
            data.state, batch, n, data.table, critic_only=critic_only, on_tokens=on_tokens
        )
        parts = [each.on_host() for each in outputs]
        data.token_outputs = _concatenated(parts)
        if parts:
            data.token_outputs["gap"] = _gap(data, parts[0]["logp"], version)
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

    def _log(
        self, data: StepData, advantages: np.ndarray, updated: dict, n: int, flops_before: float
    ) -> dict[str, float]:
        """Writes the samples. Returns the metrics of the step.

        flops_before: total_flops of the trainer at the start of the step.
        """
        sampled = data.rollouts
        scores = data.scores
        context = self.context
        assert sampled is not None and scores is not None
        if self.config.run.samples.keeps_step(n):
            with context.timeline.span("writing samples"):
                lines = rollouts.records(sampled, scores, self.name, n, advantages)
                tokens = rollouts.token_records(sampled, data.batch, data.token_outputs)
                context.events.samples(lines, tokens, rollouts.references(sampled))
        metrics = data.metrics
        layout = context.model.graph.layout
        flops = rollouts.operations(sampled, self.trainer.flops)
        seconds = sampled.seconds
        metrics |= rates("sample", flops, sampled.counts["tokens"], seconds, layout)
        metrics |= memory_share(
            sampled.counts["steps"] * context.generator.weight_bytes, seconds, layout
        )
        metrics |= {
            f"advantage/{name}": float(getattr(advantages, name)())
            for name in ("mean", "std", "min", "max")
        }
        metrics["perf/step_tflop"] = (flops + self.trainer.total_flops - flops_before) / 1e12
        drafted = self.config.generator.speculative > 0
        return rollouts.metrics(sampled, scores, drafted=drafted) | metrics | updated


def _check_scored(stage: Stage, scores: Scores) -> None:
    """Raises RewardStop after `rewards.unscored_steps` steps in a row without one score."""
    progress = stage.context.progress
    progress.unscored_steps = 0 if np.isfinite(scores.total).any() else progress.unscored_steps + 1
    limit = min(stage.rewards.unscored_steps, stage.options.total_steps)
    if limit and progress.unscored_steps >= limit:
        raise RewardStop(_unscored_text(stage.name, progress.unscored_steps, scores))


def _unscored_text(stage: str, steps: int, scores: Scores) -> str:
    """Returns the message about steps without a score, with the first fault of the last one."""
    cause = "every function returned None (not applicable)"
    if scores.faults:
        fault = scores.faults[0]
        cause = (
            f"{fault.function} failed ({fault.kind}): "
            f"{fault.traceback.strip().rpartition(chr(10))[2]}"
        )
    return (
        f"{stage}: no completion of the last {steps} steps has a score, so there is nothing to "
        f"learn: {cause}. Test the function with `rl reward test`, or set "
        "rewards.unscored_steps=0 to go on"
    )


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


def _check_difference(limit: float | None, difference: float | None) -> None:
    """Raises ModelError where generator and trainer differ by more than `limit`, which is
    `max_logp_diff`."""
    if limit is not None and difference is not None and not difference <= limit:
        raise ModelError(
            f"the log-probabilities of generator and trainer differ by {difference:.3g} per token "
            f"in the mean, more than max_logp_diff ({limit:g}). Use `generator.exact: true`, "
            "`router_replay: true` or a wider dtype; the last checkpoint is from before this step"
        )


def _staleness(batch: Batch, version: int) -> tuple[bool, dict[str, float]]:
    """Counts the updates between the weights that sampled each token of the mask and the current
    weights.

    Returns (whether any token is stale, metrics).
    """
    assert batch.version is not None
    stale = version - batch.version[batch.mask != 0]
    if not stale.size:
        return False, {}
    metrics = {
        "async/staleness_mean": float(stale.mean()),
        "async/staleness_max": float(stale.max()),
    }
    return bool(stale.any()), metrics


def _gap(data: StepData, first_logp: np.ndarray, version: int) -> np.ndarray:
    """Returns float32[N,T]: log-probabilities of the trainer minus those of the generator, under
    the same weights.

    first_logp: what the first update computed before it changed the weights. It is used if the step
    ran no pass for `trainer_logp`. The tokens of later updates are then NaN: their
    log-probabilities include the change of the policy. So are tokens that a policy older than
    `version` sampled.
    """
    batch = data.batch
    logp = data.trainer_logp
    if logp is None:
        logp = np.full(batch.mask.shape, np.nan, np.float32)
        logp[: len(first_logp)] = first_logp
    return np.where(batch.version == version, logp - batch.sampler_logp, np.float32(np.nan))


def _concatenated(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the rows of all updates of a step, by name."""
    return {
        name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())
    }


def _difference(batch: Batch, version: int) -> float | None:
    """Returns the mean |old_logp - sampler_logp| of the tokens of the mask that are not stale; None
    if all are."""
    assert batch.old_logp is not None and batch.sampler_logp is not None
    on_policy_NT = (batch.mask != 0) & ~inputs.stale_tokens(batch, version)
    return (
        float(np.abs(batch.old_logp - batch.sampler_logp)[on_policy_NT].mean())
        if on_policy_NT.any()
        else None
    )
