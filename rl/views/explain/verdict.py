"""Applies all rules to a run and writes the verdict: at most eight lines, the gravest first."""

from __future__ import annotations

from pathlib import Path

from rewards.text import quoted
from rl.errors import Fault
from rl.views.explain import (  # noqa: F401  registers the rules
    completions,
    data,
    learning,
    scores,
    standstill,
    system,
)
from rl.views.explain.learning import MIN_STEPS
from rl.views.explain.record import RunRecord, read
from rl.views.explain.rules import RUN_RULES, STAGE_RULES

LINES = 8
"""Most lines of a verdict."""


def findings(run_dir: str | Path) -> list[Fault]:
    """Returns the faults that all rules see, the gravest first, one for each illness and stage.

    Raises ConfigError if there is no run or no event of it.
    """
    return _findings(read(run_dir))


def verdict(run_dir: str | Path) -> list[str]:
    """Returns at most eight lines about a run: a summary, then its illnesses with step, number,
    cause and key to change.

    Raises ConfigError if there is no run or no event of it.
    """
    run = read(run_dir)
    every = _findings(run)
    alarms = [each for each in every if each.level != "note"]
    lines = [_summary(run, len(alarms)), *(each.message() for each in every)]
    if len(lines) > LINES:
        more = len(lines) - LINES + 1
        lines = [*lines[: LINES - 1], f"... and {more} more: rl explain {quoted(run.path)} --json"]
    return lines


def _findings(run: RunRecord) -> list[Fault]:
    every = [each for rule in RUN_RULES for each in rule(run)]
    every += [each for stage in run.stages for rule in STAGE_RULES for each in rule(stage)]
    every.sort(key=lambda each: (each.level == "note", -each.severity))
    kept: dict[tuple[str, str | None], Fault] = {}
    for each in every:
        kept.setdefault((each.name, each.stage), each)
    return list(kept.values())


def _summary(run: RunRecord, alarms: int) -> str:
    stages = ", ".join(f"{stage.name} {stage.steps} steps" for stage in run.stages)
    parts = [f"{run.path}: {stages}"]
    for stage in reversed(run.stages):
        accuracy = stage.evaluated("eval/greedy_accuracy")
        if accuracy:
            start = next(
                (
                    s.evaluated("eval/greedy_accuracy").values[0]
                    for s in run.stages
                    if s.evaluated("eval/greedy_accuracy")
                ),
                accuracy.values[0],
            )
            parts.append(f"eval/greedy_accuracy {start:.3g} -> {accuracy.values[-1]:.3g}")
            break
    if alarms:
        parts.append("1 illness" if alarms == 1 else f"{alarms} illnesses")
    elif all(stage.steps < MIN_STEPS for stage in run.stages):
        parts.append(f"no illness, but fewer than {MIN_STEPS} steps per stage say little")
    else:
        parts.append("no illness")
    return "; ".join(parts)
