"""Rules about stages that do not move: a learning rate that is too low, a KL penalty that is too
high, dropped groups.
"""

from __future__ import annotations

from collections.abc import Iterator

from policy.adapter_spec import FULL_TRAINING_RATE
from rewards.text import quoted
from rl.errors import Fault
from rl.views.explain.learning import MIN_STEPS, WEIGHT_STD, moves_by_rate
from rl.views.explain.record import StageRecord
from rl.views.explain.rules import stage_rule

SMALLEST_RATE = 1e-8
"""A step of AdamW below 2^-24 of a weight of 1 is lost in float32, and 1e-8 of WEIGHT_STD takes
20,000 updates to 1%.
"""
MOVED = 1e-3
LOSS_STAYS = 0.98
STAYS_STEPS = 20
HELD_COEF = 1.0
HELD_STEPS = 10
"""Published runs use a `kl_coef` of 0.001 to 0.1."""
KEPT_SHARE = 0.2
UNFILLED_SHARE = 0.5


@stage_rule
def learning_rate_too_low(stage: StageRecord) -> Iterator[Fault]:
    """Names a learning rate that leaves the weights where they are."""
    rate = stage.series("optim/lr")
    peak = stage.option("optimizer.learning_rate", None)
    if len(rate) < MIN_STEPS or not isinstance(peak, (int, float)):
        return
    moved = sum(rate.values) * int(stage.option("updates_per_step", 1))
    hardly_moved = len(rate) >= STAYS_STEPS and moved < MOVED * WEIGHT_STD
    stays = _what_stays(stage) if hardly_moved else ""
    if stage.run.config.get("changes"):  # the first steps may have had another peak
        peak = max(peak, rate.largest)
    if peak >= SMALLEST_RATE and not stays:
        return
    yield Fault(
        f"optim/lr is at most {rate.largest:.2g}, so {stage.steps} steps moved a weight by at "
        f"most {moved:.2g}{stays}",
        cause="The policy stays what it was",
        change=f"Raise {stage.named('optimizer.learning_rate')}; usual are 1e-6 to 1e-5 for "
        "full models, and 10 times that for adapters",
        name="learning rate too low",
        stage=stage.name,
        step=rate.steps[0],
        severity=0.7,
        level="warn",
    )


@stage_rule
def rate_of_full_training(stage: StageRecord) -> Iterator[Fault]:
    """Remarks that an adapter has a learning rate that looks like one for all weights, unless
    reward or evaluation got better."""
    rate = stage.series("optim/lr")
    if not stage.trains_adapter or len(rate) < MIN_STEPS or not moves_by_rate(stage):
        return
    if rate.largest > FULL_TRAINING_RATE or stage.reward_rose or stage.improved:
        return
    yield Fault(
        f"optim/lr is at most {rate.largest:.2g}, which looks like a rate for all weights",
        cause="The stage trains an adapter, which learns at about 10 times that rate",
        change=f"Try 10 times {stage.named('optimizer.learning_rate')}; see docs/adapters.md",
        name="learning rate of an adapter",
        stage=stage.name,
        step=rate.steps[0],
        severity=0.3,
        level="note",
    )


def _what_stays(stage: StageRecord) -> str:
    """Returns the end of a sentence about a loss of demonstrations or a reward that does not
    change; empty: it does."""
    loss = stage.series("loss")
    reward = stage.series("reward/mean")
    if stage.algorithm.get("name") == "sft" and loss and loss.last > LOSS_STAYS * loss.first > 0:
        return f"; the loss stays at {loss.last:.3g}"
    if (
        stage.trains_on_rollouts
        and reward
        and not (stage.reward_rose or stage.improved or stage.solved)
    ):
        return f"; the reward stays at {reward.last:.3g}"
    return ""


@stage_rule
def held_by_the_reference(stage: StageRecord) -> Iterator[Fault]:
    """Names a KL penalty that outweighs the rewards: the policy may not leave its reference
    model."""
    for name, metric in (("kl_coef", "kl/ref"), ("kl_reward_coef", "kl/reward")):
        coefficient = stage.algorithm.get(name)
        divergence = stage.series(metric)
        if (
            not isinstance(coefficient, (int, float))
            or coefficient < HELD_COEF
            or len(divergence) < HELD_STEPS
        ):
            continue
        if (
            stage.reward_rose
            or stage.improved
            or stage.solved
            or stage.algorithm.get("kl_target") is not None
        ):
            continue
        reward = stage.series("reward/mean")
        level = (
            f"; reward/mean {reward.first:.3g} at first, {reward.last:.3g} at last"
            if reward
            else ""
        )
        yield Fault(
            f"{name} is {coefficient:g}, and {metric} {divergence.last:.2g} nats per token{level}",
            cause="The penalty outweighs the rewards, so the policy stays at the reference model",
            change=f"Lower {stage.named(f'algorithm.{name}')} to 0.1 or less",
            name="KL penalty too high",
            stage=stage.name,
            step=divergence.steps[0],
            severity=0.68,
            level="warn",
        )


@stage_rule
def dropped_groups(stage: StageRecord) -> Iterator[Fault]:
    """Names dynamic sampling that drops nearly all groups."""
    kept = stage.series("dynamic/kept_share")
    unfilled = stage.series("dynamic/without_difference")
    if len(kept) < MIN_STEPS or not unfilled or stage.solved:
        return
    prompts = int(stage.option("prompts_per_step", 32))
    if kept.last > KEPT_SHARE or unfilled.last < UNFILLED_SHARE * prompts:
        return
    yield Fault(
        f"dynamic sampling keeps {kept.last:.0%} of the groups, so {unfilled.last:.0f} of the "
        f"{prompts} groups of a step have equal rewards",
        cause="Hardly a problem is neither too hard nor too easy, or the reward is constant",
        change=f"Read samples (`rl samples {quoted(stage.run.path)}`) and test the reward; use "
        f"other problems, or more {stage.named('samples_per_prompt')}",
        name="groups dropped",
        stage=stage.name,
        step=kept.since(lambda share: share <= KEPT_SHARE) or kept.steps[0],
        severity=0.8,
        level="warn",
    )
