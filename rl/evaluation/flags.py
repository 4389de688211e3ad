"""The flags of the command line of an evaluation, and a task as they change it."""

from __future__ import annotations

from dataclasses import dataclass

from rewards import registry
from rl.errors import ConfigError
from rl.evaluation.task import Task, parsed


@dataclass(frozen=True)
class EvalFlags:
    """What the command line says; None: as the task has it.

    data: file or folder with the rows. columns: name -> column of that file. rewards: texts of
    --reward. seed: of sampling and of shuffled options.
    """

    seed: int = 0
    data: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    rewards: tuple[str, ...] = ()
    split: str | None = None
    samples: int | None = None
    k: tuple[int, ...] | None = None
    maj: tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    limit: int | None = None
    few_shot: int | None = None
    chat: bool | None = None
    system: str | None = None
    correct_at: float | None = None


def with_flags(task: Task, flags: EvalFlags) -> Task:
    """Returns a task as the command line changes it. Raises ConfigError for numbers that do not fit
    together."""
    changed = {
        name: value
        for name in ("samples", "temperature", "top_p", "max_new_tokens", "system", "split")
        if (value := getattr(flags, name)) is not None
    }
    samples = changed.get("samples", task.samples)
    if samples > 1 and changed.get("temperature", task.temperature) == 0:
        if flags.temperature == 0:
            raise ConfigError(
                f"--samples {samples} --temperature 0: all samples of a problem would be the same; "
                "add --temperature 1, or --samples 1"
            )
        changed["temperature"] = 1.0
    for name in ("k", "maj"):
        given = getattr(flags, name)
        if given is None:
            changed[name] = [k for k in getattr(task, name) if k <= samples]
        elif wrong := [k for k in given if not 1 <= k <= samples]:
            raise ConfigError(
                f"--{name} {wrong[0]}: between 1 and the samples of a problem ({samples}); add "
                f"--samples {max(given)}"
            )
        else:
            changed[name] = [*given]
    if flags.k is None and samples > 1 and not changed["k"]:
        changed["k"] = [samples]
    if flags.stop:
        changed["stop"] = [*task.stop, *flags.stop]
    changed_task = parsed(task.model_dump() | changed, lambda key: "command line")
    _check(changed_task, flags)
    return changed_task


def _check(task: Task, flags: EvalFlags) -> None:
    if task.maj:
        first = next(iter(task.scores.values()))
        if registry.answer_of(first.reward, first.options) is None:
            raise ConfigError(
                f"maj@{task.maj[0]}: reward {first.reward} does not tell what a completion "
                "answers; use math, numeric_answer, exact_answer or choice_answer, or register "
                "yours with @reward(answer=...)"
            )
    for score in task.scores.values():
        if score.reward == registry.REWARD_MODEL:
            raise ConfigError(
                "--reward reward_model: reward models score in a run only (docs/rewards.md); name "
                "a function"
            )
    if flags.few_shot and task.shots is None and not flags.rewards:
        raise ConfigError(
            f"--few-shot {flags.few_shot}: the task has no rows for shots (`shots` of its file)"
        )
