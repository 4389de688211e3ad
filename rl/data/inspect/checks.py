"""Applies the checks to the rows of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl.data.inspect.row_checks import ROW_CHECKS
from rl.data.inspect.setting_checks import SETTING_CHECKS
from rl.data.inspect.stage_rows import StageRows
from rl.data.inspect.template_checks import TEMPLATE_CHECKS, end_of_turn_problem
from rl.errors import Fault, Level

__all__ = ["check_stages", "end_of_turn_problem"]
_ORDER: dict[Level, int] = {"refuse": 0, "warn": 1, "note": 2}


def check_stages(stages: Sequence[StageRows], random_weights: bool = False) -> list[Fault]:
    """Returns the faults that all checks see but that of the reward (13): refusals first, then in
    the order of the checks.

    random_weights: whether the run starts from random weights.
    """
    results = [each for stage in stages for each in _stage(stage)]
    if random_weights:
        results += _random(stages)
    return in_order(results)


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Sorts faults by level, then by the number of the check. Of faults with equal text, several
    stages share one."""
    kept: dict[tuple, Fault] = {}
    for each in faults:
        kept.setdefault((each.check, each.level, each.text), each)
    return sorted(kept.values(), key=lambda each: (_ORDER[each.level], each.check))


def _stage(stage: StageRows) -> Iterator[Fault]:
    for check in (*TEMPLATE_CHECKS, *ROW_CHECKS, *SETTING_CHECKS):
        yield from check(stage)
    if stage.problems:
        example, text = stage.problems[0]
        yield Fault(
            f"{len(stage.problems)} rows cannot be encoded, first {example.where}: {text}",
            "Mend these rows",
            check=11,
            stage=stage.name,
        )


def _random(stages: Sequence[StageRows]) -> Iterator[Fault]:
    """15: random weights without a stage that teaches from demonstrations before the first one that
    samples."""
    first = next((number for number, stage in enumerate(stages) if stage.samples), None)
    taught = any(stage.kind == "supervised" for stage in stages[:first])
    if first is not None and not taught:
        yield Fault(
            "the weights are random, and no stage teaches them before rewards do",
            "Set model to a directory or a name of the hub with weights, or add a stage sft",
            level="warn",
            check=15,
            stage=stages[first].name,
        )
    yield Fault("weights: random", level="note", check=15)
