"""Rules about data: the mask, templates that differ between stages, data that is used up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp

from policy.json_types import JsonObject, JsonValue, as_objects
from rewards.text import quoted
from rl.errors import Fault
from rl.views.explain.learning import MIN_STEPS
from rl.views.explain.record import RunRecord, StageRecord
from rl.views.explain.rules import run_rule, stage_rule

EPOCHS_SFT = 4.0
EPOCHS_RL = 10.0
MASK_NONE = 0.01
UNTRAINED_TOKENS = 1.5
EMPTY_SHARE = 0.5
GAP = 0.15
INSPECTION = {
    2: "wrong template or stop token",
    4: "wrong mask",
    5: "wrong template or stop token",
    11: "wrong mask",
}
"""Check of rl/data/inspect -> the illness that it announces."""


@stage_rule
def mask(stage: StageRecord) -> Iterator[Fault]:
    """Names a mask that covers prompts, or hardly anything."""
    share = stage.series("batch/trained_share")
    learns_from_answers = not stage.trains_on_rollouts and stage.steps >= MIN_STEPS
    everything = stage.algorithm.get("train_on") == "all"
    see = f"see the mask of each token with `rl inspect {quoted(stage.run.path)}`"
    change = f"Set {stage.key('algorithm.train_on')}: assistant; {see}"
    if learns_from_answers and (everything or _prompts_are_trained_on(stage)):
        shown = (
            f"{share.typical:.0%} of the tokens are trained on"
            if share
            else "every token but the first is trained on"
        )
        yield Fault(
            f"{shown}{' (train_on: all)' if everything else ''}",
            cause="The loss covers the prompts too, so the policy learns to write problems",
            change=change,
            name="wrong mask",
            stage=stage.name,
            step=1,
            severity=0.83,
            level="warn",
        )
    elif learns_from_answers and share and share.typical <= MASK_NONE:
        yield Fault(
            f"{share.typical:.1%} of the tokens are trained on",
            cause="The mask leaves out the answers",
            change=change,
            name="wrong mask",
            stage=stage.name,
            step=1,
            severity=0.83,
            level="warn",
        )
    empty = stage.series("sequences/empty")
    per_update = stage.completions_per_step / max(1, int(stage.option("updates_per_step", 1)))
    if (
        stage.trains_on_rollouts
        and len(empty) >= MIN_STEPS
        and empty.last >= EMPTY_SHARE * per_update
    ):
        cut = (
            " (mask_truncated leaves out those that were cut)"
            if stage.algorithm.get("mask_truncated")
            else ""
        )
        yield Fault(
            f"{empty.last / per_update:.0%} of the completions have no token in the loss{cut}",
            cause="Completions without a score, or that the mask leaves out, teach nothing",
            change=f"Raise {stage.named('sampling.max_new_tokens')}, or mend the reward",
            name="wrong mask",
            stage=stage.name,
            step=empty.since(lambda value: value >= EMPTY_SHARE * per_update),
            severity=0.8,
            level="warn",
        )


def _prompts_are_trained_on(stage: StageRecord) -> bool:
    """Tells whether at most UNTRAINED_TOKENS of a sequence are left out in an SFT: its first token
    has no prediction.
    """
    share = stage.series("batch/trained_share")
    tokens = stage.series("perf/step_tokens")
    if stage.algorithm.get("name") != "sft" or not share or not tokens:
        return False
    return (1 - share.typical) * tokens.typical / int(
        stage.option("prompts_per_step", 32)
    ) <= UNTRAINED_TOKENS


@stage_rule
def exhausted(stage: StageRecord) -> Iterator[Fault]:
    """Names a stage that goes over its data again and again."""
    epochs = stage.epochs
    limit = EPOCHS_RL if stage.trains_on_rollouts else EPOCHS_SFT
    if stage.steps < MIN_STEPS or epochs <= limit or stage.improving and epochs <= 4 * limit:
        return
    reward = stage.series("reward/mean")
    accuracy = stage.evaluated("eval/greedy_accuracy")
    gap = (
        f"; reward/mean {reward.last:.2g}, eval/greedy_accuracy {accuracy.values[-1]:.2g}"
        if reward and accuracy
        else ""
    )
    loss = stage.series("nll")
    gap = gap or (f"; nll fell to {loss.last:.2g}" if loss else "")
    dataset = stage.repeated_dataset
    data = "its data" if dataset is None else f"its dataset {dataset}"
    yield Fault(
        f"the stage has gone over {data} {epochs:.0f} times{gap}",
        cause="The policy memorises the rows",
        change=f"Add rows to {stage.setting('data')[1]}, "
        + ("" if dataset is None else f"lower the weight of {dataset}, ")
        + f"or lower {stage.named('steps')}",
        name="data exhausted",
        stage=stage.name,
        step=stage.step_of_epoch(limit),
        severity=0.72,
        level="warn",
    )


@stage_rule
def training_below_evaluation(stage: StageRecord) -> Iterator[Fault]:
    """Names training prompts that score far below the evaluation of the same weights, before the
    first update."""
    reward = stage.series("reward/mean")
    before = stage.evaluated("eval/reward_mean")
    if len(reward) < MIN_STEPS or not before or before.steps[0] != 0:
        return
    start = before.values[0]
    error = (max(start * (1 - start), 0.01) / stage.run.evaluation_problems) ** 0.5
    if (
        start - 4 * error <= 0
        or reward.values[0] > GAP * start * _share_of_greedy(stage)
        or stage.series("reward/faults").values[:1] not in ([], [0.0])
    ):
        return
    yield Fault(
        f"reward/mean is {reward.values[0]:.2g} at step {reward.steps[0]}, eval/reward_mean "
        f"{start:.2g} before it",
        cause="The same weights do far worse on the training prompts, which are rendered in "
        "another form, or are harder",
        change=f"Compare both with `rl inspect {quoted(stage.run.path)}`; set "
        f"{stage.setting('data')[1]}.chat, system or prompt_template",
        name="wrong template",
        stage=stage.name,
        step=reward.steps[0],
        severity=0.92,
        level="warn",
    )


def _share_of_greedy(stage: StageRecord) -> float:
    """Returns how often a sample of the first step is about what the policy writes greedily, as the
    evaluation does: exp(-entropy of a completion). Samples of a policy that is not sure of its
    words score less in any form."""
    entropy = stage.series("entropy")
    length = stage.series("completion/mean_length")
    return exp(-entropy.values[0] * length.values[0]) if entropy and length else 1.0


@run_rule
def templates(run: RunRecord) -> Iterator[Fault]:
    """Names stages whose prompts are rendered in different ways, and evaluations that differ from
    the training."""
    previous: tuple[StageRecord, JsonObject] | None = None
    for stage in run.stages:
        if not (shape := _rendering(stage.setting("data")[0])):
            continue
        if previous and shape != previous[1]:
            yield _different(stage, f"{previous[0].name} and {stage.name}", previous[1], shape)
        previous = (stage, shape)
    evaluation = run.config.get("evaluation")
    data = evaluation.get("data") if isinstance(evaluation, Mapping) else None
    if not previous or not isinstance(data, Mapping):
        return
    stage, shape = previous
    # Rows of another file may have another form, which needs another rendering.
    trained = stage.setting("data")[0]
    if _rendering(data) != shape and all(
        data.get(key) == trained.get(key) for key in ("path", "task")
    ):
        yield _different(stage, f"{stage.name} and its evaluation", shape, _rendering(data))


def _rendering(data: JsonObject) -> JsonObject:
    """Returns what decides how a plain prompt is rendered."""
    if not data:
        return {}
    chat = bool(data.get("chat") or data.get("system"))
    return {
        "chat": chat,
        "system": data.get("system"),
        "prompt_template": data.get("prompt_template"),
    }


def _different(stage: StageRecord, who: str, one: JsonObject, other: JsonObject) -> Fault:
    keys = [key for key in one if one[key] != other[key]]
    shown = ", ".join(f"{key}: {one[key]} and {other[key]}" for key in keys)
    return Fault(
        f"the prompts of {who} are rendered in different ways ({shown})",
        cause="The policy is asked in another form than it was taught",
        change=f"Give both the same {', '.join(f'data.{key}' for key in keys)}",
        name="wrong template",
        stage=stage.name,
        step=1,
        severity=0.82,
        level="warn",
    )


@run_rule
def inspection(run: RunRecord) -> Iterator[Fault]:
    """Repeats the warnings of the checks at the start of the run that announce an illness."""
    for each in run.inspection:
        illness = INSPECTION.get(check) if isinstance(check := each.get("check"), int) else None
        if illness and each.get("level") in ("warn", "refuse"):
            yield Fault(
                str(each.get("text")),
                cause=f"Check {check} at the start of the run",
                change=str(each.get("change") or f"Run `rl inspect {quoted(run.path)}`"),
                name=illness,
                stage=_stage_of(each.get("stage")),
                step=0,
                severity=0.6,
                level="warn",
            )


@run_rule
def probe(run: RunRecord) -> Iterator[Fault]:
    """Repeats what the probe before the first step showed."""
    for problem in as_objects(run.probed.get("problems")):
        yield Fault(
            str(problem.get("text")),
            cause="The probe before the first step shows it",
            change=f"Run `rl inspect {quoted(run.path)} --probe 64`",
            name=str(problem.get("illness")),
            stage=_stage_of(run.probed.get("stage")),
            step=0,
            severity=0.3,
            level="warn",
        )


def _stage_of(value: JsonValue) -> str | None:
    return value if isinstance(value, str) else None
