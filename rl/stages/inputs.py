"""Providers: one function of this file computes each input that an algorithm names in `inputs`.

A provider reads and extends the StepData of a step. Its decorator says when it runs, which fields
of the batch its input adds, which part of the RunState it reads and which compiled function it
calls. The state of a stage, its compilation and plans follow from that.

Scores and rewards are numbers for completions, from reward functions and reward models; a reward is
the weighted sum of scores. Log-probabilities and values are numbers for tokens, from passes of a
model over the batch.

Shapes: P prompts, G completions of one prompt, N = P G completions, T tokens, F reward functions.
Letters after an underscore are the axes: mask_NT is [N, T].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from rl.accounting.flops import rates
from rl.accounting.program_names import ProgramName
from rl.stages.sampling.batches import by_row, one_row_each
from rl.stages.sampling.params import greedy_params
from rl.stages.sampling.staleness import stale_tokens
from rl.stages.sampling.teacher_rows import teacher_logprobs
from rl.stages.scorers import teacher_program_name
from rl.stages.shapes import abstract_batch, abstract_rows, with_structure
from rl.stages.stage import Program, StageKind

if TYPE_CHECKING:
    from policy.cache.media import MediaTable
    from rewards import Scores
    from rl.training.media.tables import StepTable
    from rl.training.trainer import RunState
    from rl.training.weights import Weights
    from rollout.collect import Rollouts

EXAMPLES = "examples"
SAMPLING = "sampling"
MODEL_PASSES = "model passes"
REWARDS = "rewards"
"""When a provider runs.

EXAMPLES: with the batch of a stage that draws examples from its data.
SAMPLING: after the groups of the step, while the generator still has its weights, so that it can
sample more. MODEL_PASSES: when the batch is made, before the step waits for the rewards. REWARDS:
when the rewards are there.
"""


@dataclass
class StepData:
    """The data of a step while the stage assembles it.

    state: the RunState of the stage. batch: all rows of the step, before they are split into
    mini-batches and packed. table: rows of pictures and sounds; None without them.
    rollouts: the groups. scores: the scores of each reward function, and their weighted sums.
    rewards: float[P,G], the sums as `advantages` takes them (float[P,G,F], each function, under
    `each_reward`). arguments: keyword arguments of `Algorithm.estimate`, which passes them to
    `advantages`. stale: whether older weights sampled a token that is trained on.
    current_policy_batch: the batch with the log-probabilities under the current policy as
    `old_logp`, if `current_logp` provides them.
    trainer_logp: float32[N,T], log-probabilities under the weights before the updates, if a pass of
    the training graph computed them. teacher_logp: float32[N,T], those of a teacher.
    token_outputs: arrays [N,T] that the updates computed, by name, and `logp_diff`
    (rl/stages/sampling/staleness.py). advantages: of each trajectory, the mean over its tokens.
    flops_before: `total_flops` of the trainer before the step.
    """

    state: RunState
    batch: Any = None
    table: StepTable | None = None
    rollouts: Rollouts | None = None
    scores: Scores | None = None
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    stale: bool = False
    current_policy_batch: Any = None
    trainer_logp: np.ndarray | None = None
    teacher_logp: np.ndarray | None = None
    token_outputs: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    flops_before: float = 0.0

    @property
    def media_rows(self) -> MediaTable | None:
        """The rows of pictures and sounds on the devices; None in a run of text."""
        return None if self.table is None else self.table.table


@dataclass(frozen=True)
class Input:
    """A provider and its requirements.

    when: EXAMPLES, SAMPLING, MODEL_PASSES or REWARDS. fields: float32[N,T] fields of the batch that
    the input adds. The provider fills them, or the stage computes them later from what it provides
    (`returns`). state: the part of the RunState that the provider reads besides the policy.
    executable: the key of `Trainer.executables` that it calls. in_some_steps: whether only some
    steps call it. needed: returns whether a stage must run the provider; if not, the update or the
    generator computes the input.
    """

    provide: Callable[[StageKind, StepData], None]
    when: str
    fields: tuple[str, ...] = ()
    state: str | None = None
    executable: ProgramName | None = None
    in_some_steps: bool = False
    needed: Callable[[StageKind], bool] = lambda stage: True


INPUTS: dict[str, Input] = {}
"""Name of an input -> its provider, in the order in which they run."""


def provides(*names: str, when: str, **declared: Any) -> Callable:
    """Registers a function as the provider of inputs; `declared`: fields of Input."""

    def register(
        function: Callable[[StageKind, StepData], None],
    ) -> Callable[[StageKind, StepData], None]:
        INPUTS.update(dict.fromkeys(names, Input(function, when, **declared)))
        return function

    return register


def active_providers(stage: StageKind) -> list[Input]:
    """Returns the providers that a step of the stage runs. Raises KeyError for an input without a
    provider."""
    named = {id(INPUTS[name]) for name in stage.inputs}
    providers = {id(each): each for each in INPUTS.values() if id(each) in named}
    return [each for each in providers.values() if each.needed(stage)]


def state_of(names: Iterable[str]) -> set[str]:
    """Returns the parts of a RunState that these inputs read, besides the policy."""
    return {part for name in names if (part := INPUTS[name].state) is not None}


def fields(stage: StageKind) -> list[str]:
    """Returns the fields of the batch that the inputs of a stage add, all float32[N,T]."""
    return list(dict.fromkeys(name for each in active_providers(stage) for name in each.fields))


def any_at(stage: StageKind, when: str) -> bool:
    """Whether a step of the stage runs a provider at this time."""
    return any(each.when == when for each in active_providers(stage))


def provide(stage: StageKind, data: StepData, when: str) -> None:
    """Runs the providers of EXAMPLES, SAMPLING, MODEL_PASSES or REWARDS."""
    for each in active_providers(stage):
        if each.when == when:
            each.provide(stage, data)


def run_model_passes(stage: StageKind, data: StepData) -> None:
    """Runs the providers of MODEL_PASSES: passes of the policy, the reference and the critic over
    the batch."""
    context = stage.context
    flops_before = stage.trainer.total_flops
    with context.timeline.span(ProgramName.LOGPROBS) as span:
        provide(stage, data, MODEL_PASSES)
    data.metrics["time/logprob"] = span.seconds
    if (flops := stage.trainer.total_flops - flops_before) > 0:
        data.metrics |= rates(
            "logprob", flops, data.batch.filled_tokens, span.seconds, context.model.graph.layout
        )


def programs(stage: StageKind, state: RunState, routes: dict | None) -> Iterator[Program]:
    """Yields the programs that the providers call, over all sequences of a step."""
    from rl.training.weights import Weights

    (_, T), R, passes = abstract_rows(stage, 1)
    micro = with_structure(stage, abstract_batch((R, T), routes))
    trainer = stage.trainer
    called = [each.executable for each in active_providers(stage)]
    in_every_step = [each.executable for each in active_providers(stage) if not each.in_some_steps]

    def program(kind: ProgramName, weights: Weights, routes: dict | None, times: int) -> Program:
        def lower() -> Any:
            read = micro.replace(mask=None, prompt=None, routes=routes)
            read = read.replace(kept=None) if kind == ProgramName.VALUES else read
            return trainer.executables[kind].lower(weights, read)

        return Program(kind, (R, T), lower, trainer.graph, weights, times)

    table = stage.table_shapes
    own_teacher = stage.teacher is not None and stage.teacher.is_own
    if ProgramName.LOGPROBS in called or own_teacher:
        weights = Weights(policy=trainer.policy_params(state), media_table=table)
        yield program(
            ProgramName.LOGPROBS,
            weights,
            micro.routes,
            passes * (in_every_step.count(ProgramName.LOGPROBS) + own_teacher),
        )
    for scorer in stage.teacher_scorers:
        read = micro.replace(mask=None, prompt=None, routes=None, kept=None)
        yield Program(
            teacher_program_name(scorer.source),
            (R, T),
            partial(scorer.executable.lower, scorer.abstract, read),
            scorer.graph,
            scorer.abstract,
            passes,
        )
    if ProgramName.VALUES in called:
        weights = trainer.value_weights(state, table)
        yield program(
            ProgramName.VALUES,
            weights,
            micro.routes if trainer.value_model.shared else None,
            passes,
        )


# Providers.


@provides("teacher", when=EXAMPLES, needed=lambda stage: stage.teacher.files is not None)
def teacher(stage: StageKind, data: StepData) -> None:
    """The likeliest tokens of a teacher, from files. A teacher that is a model runs inside the
    update."""
    batch = data.batch
    rows = cast(Any, stage).teacher_rows  # of a stage that draws examples
    data.batch = batch.replace(
        **rows.arrays(stage.example_numbers, batch.mask, stage.algorithm.top_k)
    )


@provides("greedy_reward", when=SAMPLING)
def greedy_reward(stage: StageKind, data: StepData) -> None:
    """Adds the argument `greedy`, float[P]: the reward of the greedy completion of each prompt."""
    assert data.rollouts is not None
    params = greedy_params(stage.options.sampling, stage.context.stop_ids)
    groups = data.rollouts.groups
    prompt_ids = [group.prompt_id for group in groups]
    greedy = stage.collect(data.rollouts.problems, params, prompt_ids, again=True)
    scores = greedy.scores.result()
    data.arguments["greedy"] = total = scores.total
    data.metrics["reward/greedy"] = (
        float(np.nanmean(total)) if np.isfinite(total).any() else float("nan")
    )


@provides("sampler_logp", when=MODEL_PASSES)
def sampler_logp(stage: StageKind, data: StepData) -> None:
    """Log-probabilities as the generator computed them, after filters: they come with the
    completions."""
    assert data.batch.sampler_logp is not None


def _old_pass_needed(stage: StageKind) -> bool:
    """Whether a step runs a pass for old log-probabilities and entropies.

    What only the update uses needs none, since the update computes it. Log-probabilities alone need
    none under `generator.exact`: the generator then verifies each completion with the programs of
    `Model.logprobs`, and its log-probabilities are those of `Model.logprobs`, bit for bit
    (docs/exact.md).
    """
    exact = stage.trains_on_rollouts and stage.config.generator.exact
    return "old_logp" in stage.inputs and not (exact and "entropy" not in stage.inputs)


@provides(
    "old_logp",
    "entropy",
    when=MODEL_PASSES,
    fields=("old_logp", "entropy"),
    executable=ProgramName.LOGPROBS,
    needed=_old_pass_needed,
)
def old_logp(stage: StageKind, data: StepData) -> None:
    """Log-probabilities and entropy under the policy before the updates of the step.

    The input `old_logp` is this pass. The array `Batch.old_logp`, which the ratio of the loss
    divides by, can have another source: the stage replaces it by the generator's log-probabilities
    under the algorithm's option `old_logp: sampler`, and under `generator.exact`.
    """
    params = stage.trainer.policy_params(data.state)
    logp, entropy = stage.trainer.logprobs(params, data.batch, data.media_rows)
    data.batch = data.batch.replace(old_logp=logp, entropy=entropy)
    data.trainer_logp = logp


@provides("current_logp", when=MODEL_PASSES, executable=ProgramName.LOGPROBS, in_some_steps=True)
def current_logp(stage: StageKind, data: StepData) -> None:
    """The pass of `old_logp`, in steps with tokens that an older policy sampled, unless `old_logp`
    has made it.

    Under `generator.exact`, stale tokens use them as old log-probabilities. The other tokens show
    how far generator and trainer differ.
    """
    stale_NT = stale_tokens(data.batch, cast(Any, stage).current_version)
    if not stale_NT.any():
        return
    data.current_policy_batch = data.batch
    if data.batch.old_logp is None:
        params = stage.trainer.policy_params(data.state)
        logp, entropy = stage.trainer.logprobs(params, data.batch, data.media_rows)
        data.current_policy_batch = data.batch.replace(old_logp=logp, entropy=entropy)
        data.trainer_logp = logp


@provides(
    "ref_logp",
    when=MODEL_PASSES,
    fields=("ref_logp",),
    state="reference",
    executable=ProgramName.LOGPROBS,
)
def ref_logp(stage: StageKind, data: StepData) -> None:
    """Log-probabilities under the reference model. It is another model, so its routers choose
    experts themselves."""
    reference = stage.trainer.reference_params(data.state)
    tables = stage.context.tables
    with stage.context.timeline.span("log-probabilities of the reference") as span:
        table = tables and tables.with_weights(reference, data.table)
        logp, _ = stage.trainer.logprobs(reference, data.batch.replace(routes=None), table)
    data.batch = data.batch.replace(ref_logp=logp)
    data.metrics["time/ref"] = span.seconds


def _teacher_without_rewards(stage: StageKind) -> bool:
    """Whether the teacher can score completions before their rewards are there."""
    prompt = stage.teacher_prompt
    return prompt is None or not prompt.reads_success


@provides("teacher_logp", when=MODEL_PASSES, needed=_teacher_without_rewards)
def teacher_logp(stage: StageKind, data: StepData) -> None:
    """Log-probabilities of the tokens under a teacher, at the temperature of sampling, after the
    prompt that it reads. It is another model, whose routers choose experts themselves, and its
    distribution is over all ids, whatever the filters of the sampler left."""
    assert data.rollouts is not None
    totals = None if data.scores is None else data.scores.total
    with stage.context.timeline.span("log-probabilities of the teacher") as span:
        data.teacher_logp = teacher_logprobs(stage, data.state, data.batch, data.rollouts, totals)
    data.metrics["time/teacher"] = span.seconds


@provides(
    "values",
    when=MODEL_PASSES,
    fields=("old_values", "returns"),
    state="critic",
    executable=ProgramName.VALUES,
)
def values(stage: StageKind, data: StepData) -> None:
    """Values of a critic before each token (`old_values`), and after the last token of a truncated
    completion (`last_values`). From them the algorithm estimates the advantages and `returns`.

    If the generator computed `old_values`, the program runs only for `last_values`: if the
    algorithm bootstraps truncated completions and the step has any. It then replaces `old_values`
    too.
    """
    assert data.rollouts is not None
    one_row_each(data.rollouts, "a critic")
    truncated = [trajectory.truncated for trajectory in data.rollouts.trajectories]
    if data.batch.old_values is not None and not (
        stage.algorithm.bootstrap_truncated and any(truncated)
    ):
        return
    before, after = stage.trainer.values(data.state, data.batch, data.media_rows)
    last = values_at_the_end(after, data.batch.mask, truncated)
    data.batch = data.batch.replace(old_values=before, last_values=last)


def values_at_the_end(
    after_NT: np.ndarray, mask_NT: np.ndarray, truncated_N: ArrayLike
) -> np.ndarray:
    """Returns float[N]: the value after the last token of the mask if the completion was truncated,
    else 0.

    A row without a token in the mask, as under `mask_truncated`, gets 0.
    """
    trained_NT = mask_NT != 0
    last_N = mask_NT.shape[1] - 1 - np.argmax(trained_NT[:, ::-1], axis=1)
    bootstrapped_N = np.asarray(truncated_N) & trained_NT.any(axis=1)
    return np.where(bootstrapped_N, after_NT[np.arange(len(last_N)), last_N], 0.0)


@provides("each_reward", when=REWARDS)
def each_reward(stage: StageKind, data: StepData) -> None:
    """Makes the rewards float[P,G,F], the scores of each function, NaN for a completion without a
    total. Adds the argument `weights`, float[F]: the weight of each function in the total.
    """
    assert data.scores is not None and data.rewards is not None
    scored = np.isfinite(data.scores.total)[:, None]
    data.rewards = np.where(scored, data.scores.rewards, np.nan).reshape(*data.rewards.shape, -1)
    data.arguments["weights"] = [weight for _, weight, _ in stage.runner.options.functions]


@provides("completion_mask", when=REWARDS)
def completion_mask(stage: StageKind, data: StepData) -> None:
    """Adds the argument `mask`, float[P,G,T], for advantages of tokens."""
    assert data.rewards is not None and data.rollouts is not None
    one_row_each(data.rollouts, "an algorithm that asks for the mask of completions")
    data.arguments["mask"] = data.batch.mask.reshape(*data.rewards.shape[:2], -1)


@provides("token_kl", when=REWARDS)
def token_kl(stage: StageKind, data: StepData) -> None:
    """Adds the arguments `mask`, float[P,G,T], and `token_kl`, float[P,G,T]: old_logp - ref_logp of
    each token of the mask, else 0, which the algorithm penalises in the rewards.
    """
    completion_mask(stage, data)
    batch = data.batch
    difference = np.where(batch.mask != 0, batch.old_logp - batch.ref_logp, 0.0)
    data.arguments["token_kl"] = difference.reshape(data.arguments["mask"].shape)
    data.metrics["kl/reward"] = float(difference.sum() / max(1, np.count_nonzero(batch.mask)))


@provides("teacher_kl", when=REWARDS)
def teacher_kl(stage: StageKind, data: StepData) -> None:
    """Adds the arguments `mask`, float[P,G,T], and `teacher_kl`, float[P,G,T]: old_logp -
    teacher_logp of each token of the mask that a teacher scored, else 0. Its mean is the sampled
    reverse KL.
    """
    completion_mask(stage, data)
    if data.teacher_logp is None:
        teacher_logp(stage, data)
    batch = data.batch
    assert data.teacher_logp is not None
    trained_NT = batch.mask != 0
    scored_NT = trained_NT & np.isfinite(data.teacher_logp)
    difference = np.where(scored_NT, batch.old_logp - np.nan_to_num(data.teacher_logp), 0.0)
    data.arguments["teacher_kl"] = difference.reshape(data.arguments["mask"].shape)
    data.metrics["distill/reverse_kl"] = float(difference.sum() / max(1, scored_NT.sum()))
    data.metrics["distill/scored"] = float(scored_NT.sum() / max(1, trained_NT.sum()))


@provides("correct", when=REWARDS, fields=("correct",))
def correct(stage: StageKind, data: StepData) -> None:
    """Adds `correct`, float[N,T]: 1 on the tokens of completions that the loss treats as
    demonstrations, else 0."""
    assert data.scores is not None and data.rollouts is not None
    total = by_row(data.rollouts, data.scores.total)
    data.batch = data.batch.replace(correct=stage.algorithm.correct(total, data.batch.mask))
