"""Rules about the policy: learning rate, divergence from the reference, entropy, disagreement with
the generator."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rl.errors import Fault
from rl.views.explain.record import StageRecord
from rl.views.explain.rules import stage_rule
from rl.views.explain.series import Series

MIN_STEPS = 3
"""Fewest steps for a rule about a level: configs/tiny.yml makes two, of random weights."""
WEIGHT_STD = 0.02
"""`initializer_range` of the Hugging Face configurations: AdamW moves each weight by about the
learning rate per update.
"""
LOSS_RISE = 1.25
REWARD_LOSS = 0.5
KL_LEVEL = 1.0
KL_RISING = 0.3
KL_UPDATE = 0.1
CLIPPED_RATIO = 0.2
ENTROPY_LEFT = 0.25
ENTROPY_NONE = 0.02
ENTROPY_FAST_STEPS = 25
ENTROPY_SUDDEN_STEPS = 8
"""Steps of a fall that is an illness, and of one that is an illness even while the evaluation
improves."""


@stage_rule
def learning_rate(stage: StageRecord) -> Iterator[Fault]:
    """Names a learning rate that destroys the policy: updates that are not finite, a loss that
    rises, a reward that falls, or steps as large as the weights."""
    if stage.steps < MIN_STEPS:
        return
    evidence = (
        _skipped(stage)
        or _loss_rises(stage)
        or _reward_falls(stage)
        or _large_steps(stage)
        or _far_updates(stage)
    )
    if evidence is None:
        return
    step, number = evidence
    yield Fault(
        number,
        cause="The updates destroy what the policy knew",
        change=f"Set {stage.named('optimizer.learning_rate')} to a tenth or less, or add "
        "optimizer.warmup_steps",
        name="learning rate too high",
        stage=stage.name,
        step=step,
        severity=0.95,
        level="warn",
    )


def _skipped(stage: StageRecord) -> tuple[int, str] | None:
    skipped = stage.series("optim/skipped")
    share = skipped.share(lambda value: value > 0)
    if share < 0.1:
        return None
    first = next(
        step for step, value in zip(skipped.steps, skipped.values, strict=True) if value > 0
    )
    return first, f"{share:.0%} of the steps skipped an update that was not finite (optim/skipped)"


def _loss_rises(stage: StageRecord) -> tuple[int, str] | None:
    """Compares three consecutive losses with the first: the first loss is measured before any
    update."""
    loss = stage.series("loss")
    if stage.trains_on_rollouts or len(loss) < MIN_STEPS or loss.values[0] <= 0:
        return None
    smooth = [median(loss.values[n : n + 3]) for n in range(1, len(loss) - 2)] or [loss.values[-1]]
    worst = max(range(len(smooth)), key=smooth.__getitem__)
    if smooth[worst] < LOSS_RISE * max(loss.values[:2]):
        return None
    return loss.steps[worst + 1], f"the loss rose from {loss.values[0]:.3g} to {smooth[worst]:.3g}"


def _reward_falls(stage: StageRecord) -> tuple[int, str] | None:
    """Compares reward and accuracy at the end with the start: a fall by half, and by more than four
    standard errors."""
    reward = stage.series("reward/mean")
    spread = stage.series("reward/std")
    if len(reward) >= MIN_STEPS and spread:
        start = reward.values[0]
        error = spread.values[0] / max(1, stage.completions_per_step) ** 0.5
        if start - reward.last > max(4 * error, REWARD_LOSS * abs(start)):
            step = reward.since(lambda value: start - value > REWARD_LOSS * abs(start))
            return step or reward.steps[
                -1
            ], f"reward/mean fell from {start:.3g} to {reward.last:.3g}"
    accuracy = stage.evaluated("eval/greedy_accuracy")
    problems = stage.run.evaluation_problems
    if len(accuracy) < 2:
        return None
    start = accuracy.values[0]
    end = accuracy.values[-1]
    error = (max(start * (1 - start), 0.01) / problems) ** 0.5
    if start - end > max(4 * error, REWARD_LOSS * start) and not stage.memorised:
        return accuracy.steps[-1], f"eval/greedy_accuracy fell from {start:.3g} to {end:.3g}"
    return None


def _large_steps(stage: StageRecord) -> tuple[int, str] | None:
    rate = stage.series("optim/lr")
    if not rate or rate.largest < WEIGHT_STD or not moves_by_rate(stage):
        return None
    step = rate.steps[rate.values.index(rate.largest)]
    return (
        step,
        f"optim/lr {rate.largest:.2g} moves every weight by about its own size ({WEIGHT_STD}) in "
        "one update",
    )


def moves_by_rate(stage: StageRecord) -> bool:
    """Returns whether an update moves a weight by about the learning rate, as AdamW's does: not by
    the gradient, by the size of its matrix or by that of its weights."""
    return (
        stage.option("optimizer.name", "adamw") != "sgd"
        and stage.option("optimizer.update_scale", "match_rms_adamw") == "match_rms_adamw"
        and not stage.option("optimizer.scale_parameter", False)
    )


def _far_updates(stage: StageRecord) -> tuple[int, str] | None:
    moved = stage.series("kl/approx_update")
    clipped = stage.series("clip_ratio/region_mean")
    for name, series, limit in (
        ("kl/approx_update", moved, KL_UPDATE),
        ("clip_ratio/region_mean", clipped, CLIPPED_RATIO),
    ):
        if len(series) >= MIN_STEPS and series.last > limit:
            step = series.since(lambda value, limit=limit: value > limit) or series.steps[-1]
            return (
                step,
                f"the updates of a step move the policy far: {name} {series.last:.2g}, above "
                f"{limit}",
            )
    return None


@stage_rule
def divergence(stage: StageRecord) -> Iterator[Fault]:
    """Names a policy that leaves its reference model."""
    for metric, coefficient in (("kl/ref", "kl_coef"), ("kl/reward", "kl_reward_coef")):
        series = stage.series(metric)
        if len(series) < MIN_STEPS:
            continue
        rising = (
            series.last >= KL_RISING
            and series.last >= 3 * max(series.first, 0.01)
            and series.rises()
        )
        if series.last < KL_LEVEL and not rising:
            continue
        yield Fault(
            f"{metric} is {series.last:.2g} nats per token (at first {series.values[0]:.2g})",
            cause="The policy has left the reference model",
            change=f"Raise {stage.named(f'algorithm.{coefficient}')}, or lower the learning rate",
            name="KL blow-up",
            stage=stage.name,
            step=series.since(lambda value: value >= KL_RISING),
            severity=0.8,
            level="warn",
        )


@stage_rule
def entropy(stage: StageRecord) -> Iterator[Fault]:
    """Names an entropy that collapses, or rises without end."""
    series = stage.series("entropy")
    if not stage.trains_on_rollouts or len(series) < MIN_STEPS:
        return
    start = max(series.values[: series.window])
    if series.last <= ENTROPY_LEFT * start:
        steps = _steps_of_fall(series, start)
        fast = steps is not None and steps <= ENTROPY_FAST_STEPS
        sudden = steps is not None and steps <= ENTROPY_SUDDEN_STEPS
        useless = fast or series.last < ENTROPY_NONE or not stage.solved
        if sudden or (useless and not stage.improved):
            yield Fault(
                f"entropy fell from {start:.2g} to {series.last:.2g} nats per token"
                + (f" within {steps} steps" if fast else ""),
                cause="The samples of a group become equal, and nothing is explored",
                change=f"Lower {stage.named('optimizer.learning_rate')}, raise "
                "algorithm.epsilon_high, or set algorithm.entropy_coef; check what the reward "
                "pays for",
                name="entropy collapse",
                stage=stage.name,
                step=series.since(lambda value: value <= ENTROPY_LEFT * start),
                severity=0.75,
                level="warn",
            )
    elif series.last >= 2 * series.values[0] and series.rises() and not stage.improved:
        yield Fault(
            f"entropy rose from {series.values[0]:.2g} to {series.last:.2g} nats per token",
            cause="The policy becomes random",
            change=f"Lower {stage.named('optimizer.learning_rate')} or algorithm.entropy_coef",
            name="entropy rises",
            stage=stage.name,
            step=series.since(lambda value: value >= 2 * series.values[0]),
            severity=0.7,
            level="warn",
        )


def _steps_of_fall(series: Series, start: float) -> int | None:
    """Returns the steps between the last value of at least 3/4 of `start` and the next one of at
    most ENTROPY_LEFT."""
    end = next((n for n, value in enumerate(series.values) if value <= ENTROPY_LEFT * start), None)
    if end is None:
        return None
    high = [n for n in range(end) if series.values[n] >= 0.75 * start]
    return series.steps[end] - series.steps[high[-1]] if high else None


@stage_rule
def disagreement(stage: StageRecord) -> Iterator[Fault]:
    """Names a generator whose log-probabilities differ from the trainer's."""
    series = stage.series("sampler/logp_diff_mean")
    limit = 1e-3 if stage.run.float32 else 0.05
    if (
        len(series) < MIN_STEPS
        or series.last <= limit
        or stage.series("async/staleness_max").share(lambda v: v > 0) > 0.5
    ):
        return
    yield Fault(
        f"sampler/logp_diff_mean is {series.last:.2g}, above {limit:g}",
        cause="They compute different probabilities for the same tokens",
        change=f"Set {stage.key('algorithm.correction')}: token_truncate, "
        "generator.exact: true, or a wider model.dtype",
        name="generator and trainer disagree",
        stage=stage.name,
        step=series.since(lambda value: value > limit),
        severity=0.6,
        level="warn",
    )
