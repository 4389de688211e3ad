"""Defines a finding of a rule, and the registry of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rl.views.explain.record import RunRecord, StageRecord


@dataclass(frozen=True)
class Finding:
    """One illness of a run, or a remark about it.

    illness: name of the illness, as in docs/diagnose.md. stage, step: where it begins; None: it
    concerns the full run. number: the measurement. cause: the likely reason. change: the key to
    change, or the command to type. severity: 0 to 1; a root cause has a higher one than what
    follows from it. alarm: False for a remark about a healthy run.
    """

    illness: str
    number: str
    cause: str
    change: str
    stage: str | None = None
    step: int | None = None
    severity: float = 0.5
    alarm: bool = True

    def line(self) -> str:
        """Returns the finding as one line."""
        place = " ".join(
            filter(None, (self.stage, f"step {self.step}" if self.step is not None else ""))
        )
        return (
            f"{self.illness}{f' ({place})' if place else ''}: {self.number}. {self.cause}. "
            f"{self.change}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as values that JSON can hold."""
        return asdict(self)


StageRule = Callable[[StageRecord], Iterator[Finding]]
RunRule = Callable[[RunRecord], Iterator[Finding]]
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
