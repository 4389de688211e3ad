"""Rules about rewards: faults, equal rewards, rewards that are exploited, groups that older weights
sampled."""

from __future__ import annotations

from collections.abc import Iterator

from rewards.text import quoted
from rl.errors import Fault
from rl.records.equal_groups import EQUAL_SHARE
from rl.views.explain.learning import MIN_STEPS
from rl.views.explain.record import StageRecord
from rl.views.explain.rules import stage_rule

FAULTY_SHARE = 0.005
STALE_MEAN = 1.0
STALE_MOST = 4
FEWEST_FAULTS = 2
UNSCORED_SHARE = 0.05


@stage_rule
def faults(stage: StageRecord) -> Iterator[Fault]:
    """Names reward functions that fail, and completions without a score."""
    failed = stage.series("reward/faults")
    late = stage.series("reward/timeouts")
    if not failed:
        return
    batches = stage.series("dynamic/batches").values or [1.0] * len(failed)
    completions = sum(max(1.0, count) for count in batches) * stage.completions_per_step
    total = sum(failed.values)
    unscored = [
        step
        for step, metrics in stage.rows
        if "reward/mean" in metrics and metrics["reward/mean"] is None
    ]
    if len(unscored) * 2 > stage.steps and total == 0:
        yield Fault(
            f"no completion has a score in {len(unscored)} of {stage.steps} steps",
            cause="Every reward function returned None (not applicable)",
            change=f"Check the columns that {_functions(stage)} reads, with `rl inspect "
            f"{quoted(stage.run.path)}`",
            name="no scores",
            stage=stage.name,
            step=unscored[0],
            severity=0.98,
            level="warn",
        )
    if total < FEWEST_FAULTS or total / completions < FAULTY_SHARE:
        return
    timeouts = sum(late.values)
    slow = timeouts * 2 > total
    first = next(step for step, value in zip(failed.steps, failed.values, strict=True) if value > 0)
    yield Fault(
        f"{total / completions:.1%} of the scores are missing ({total:.0f} faults, {timeouts:.0f} "
        "of them timeouts)",
        cause=f"{_functions(stage)} "
        f"{'does not answer in time' if slow else 'raises or returns no number'}",
        change=f"Raise {stage.setting('rewards')[1]}.timeout_s or make it faster"
        if slow
        else "Read the first tracebacks in the console log, then `rl reward test FUNCTION`",
        name="reward faults",
        stage=stage.name,
        step=first,
        severity=0.97 if unscored else 0.85,
        level="warn",
    )


@stage_rule
def unscored_evaluations(stage: StageRecord) -> Iterator[Fault]:
    """Names evaluations whose accuracy leaves out completions without a score."""
    unscored = stage.evaluated("eval/unscored")
    problems = stage.evaluated("eval/problems")
    if not unscored or not problems:
        return
    count = unscored.values[-1]
    every = problems.values[-1]
    if count < max(FEWEST_FAULTS, UNSCORED_SHARE * every):
        return
    yield Fault(
        f"{count:.0f} of {every:.0f} completions of the last evaluation have no score "
        "(eval/unscored)",
        cause="A reward fails on them or does not apply, and the accuracy is that of the others",
        change=f"Read some (`rl samples {quoted(stage.run.path)} 'eval unscored'`), then `rl "
        "reward test FUNCTION`",
        name="evaluation without scores",
        stage=stage.name,
        step=unscored.since(lambda value: value > 0),
        severity=0.6,
        level="warn",
    )


def _functions(stage: StageRecord) -> str:
    """Returns the names of the reward functions of a stage."""
    functions = stage.setting("rewards")[0].get("functions")
    names = [
        str(each.get("name", each) if isinstance(each, dict) else each)
        for each in (functions if isinstance(functions, list) else ())
    ]
    return ", ".join(names) or "the reward"


@stage_rule
def equal_rewards(stage: StageRecord) -> Iterator[Fault]:
    """Names groups with equal rewards, which teach nothing where no teacher grades tokens."""
    equal = stage.series("reward/frac_zero_std")
    spread = stage.series("reward/std")
    if len(equal) < MIN_STEPS or stage.has_teacher:
        return
    constant = len(spread) >= MIN_STEPS and spread.largest == 0
    grouped = int(stage.option("samples_per_prompt", 8)) > 1
    step = equal.since(lambda value: value >= EQUAL_SHARE)
    if not constant and (not grouped or step is None or equal.last < EQUAL_SHARE or stage.solved):
        return
    reward = stage.series("reward/mean")
    dynamic = "" if stage.algorithm.get("dynamic_batches") else ", or algorithm.dynamic_batches"
    level = f", reward/mean {reward.last:.3g}" if reward else ""
    yield Fault(
        f"{equal.last:.0%} of the groups have equal rewards{level}"
        + (" and no completion of the stage ever got another one" if constant else ""),
        cause="Nothing can be learned from such a group: "
        + ("the reward is constant" if constant else "problems too hard or too easy"),
        change=f"Test {_functions(stage)} with `rl reward test`, and its column with `rl inspect`"
        if constant
        else "Use other problems, a finer reward, or more "
        f"{stage.named('samples_per_prompt')}{dynamic}",
        name="equal rewards",
        stage=stage.name,
        step=equal.steps[0] if constant else step,
        severity=0.79 if constant else 0.65,
        level="warn",
    )


@stage_rule
def exploited(stage: StageRecord) -> Iterator[Fault]:
    """Names a reward that rises while the held-out accuracy falls."""
    reward = stage.series("reward/mean")
    accuracy = stage.evaluated("eval/greedy_accuracy")
    if len(reward) < MIN_STEPS or len(accuracy) < 2 or not stage.memorised or stage.epochs > 4:
        return
    yield Fault(
        f"reward/mean rose from {reward.first:.3g} to {reward.last:.3g}, eval/greedy_accuracy "
        f"fell from {accuracy.values[0]:.3g} to {accuracy.values[-1]:.3g}",
        cause="The policy learns something that the reward pays for and the evaluation does not",
        change=f"Read the best samples (`rl samples {quoted(stage.run.path)} --sort reward`), and "
        "mend the reward",
        name="reward exploited",
        stage=stage.name,
        step=accuracy.steps[-1],
        severity=0.7,
        level="warn",
    )


@stage_rule
def stale_groups(stage: StageRecord) -> Iterator[Fault]:
    """Names completions that are trained on long after they were sampled."""
    mean = stage.series("async/staleness_mean")
    most = stage.series("async/staleness_max")
    if len(most) < MIN_STEPS:
        return
    means = dict(zip(mean.steps, mean.values, strict=True))
    old = [
        n
        for n, (step, value) in enumerate(zip(most.steps, most.values, strict=True))
        if value > STALE_MOST or means.get(step, 0.0) > STALE_MEAN
    ]
    if not old:
        return
    yield Fault(
        f"{len(old)} of {len(most)} steps train on tokens that are up to {most.largest:.0f} "
        f"updates old (mean {mean.largest:.2g})",
        cause="Groups are carried to later steps, and each step makes "
        f"{stage.option('updates_per_step', 1)} updates",
        change=f"Lower {stage.named('updates_per_step')}, raise prompts_per_step, or set "
        "algorithm.correction: token_truncate",
        name="stale groups",
        stage=stage.name,
        step=most.steps[old[0]],
        severity=0.6,
        level="warn",
    )
