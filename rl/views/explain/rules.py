"""The registry of rules. A rule yields the illnesses of a run, and remarks about it, as faults:
`name` is the illness as in docs/diagnose.md, `text` the measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy.json_types import JsonValue
from rl.errors import Fault
from rl.views.explain.record import RunRecord, StageRecord

StageRule = Callable[[StageRecord], Iterator[Fault]]
RunRule = Callable[[RunRecord], Iterator[Fault]]
STAGE_RULES: list[StageRule] = []
RUN_RULES: list[RunRule] = []


def stage_rule(rule: StageRule) -> StageRule:
    """Registers a rule that looks at one stage at a time."""
    STAGE_RULES.append(rule)
    return rule


def run_rule(rule: RunRule) -> RunRule:
    """Registers a rule that looks at the full run."""
    RUN_RULES.append(rule)
    return rule


def to_json(fault: Fault) -> dict[str, JsonValue]:
    """Returns a fault as `rl explain --json` prints it."""
    return {
        "illness": fault.name,
        "number": fault.text,
        "cause": fault.cause,
        "change": fault.change,
        "stage": fault.stage,
        "step": fault.step,
        "severity": fault.severity,
        "alarm": fault.level != "note",
    }
