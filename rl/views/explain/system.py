"""Rules about the machine and the end of a run: memory, exit codes."""

from __future__ import annotations

from collections.abc import Iterator

from rewards.text import quoted
from rl.errors import Fault
from rl.views.explain.record import RunRecord, StageRecord
from rl.views.explain.rules import run_rule, stage_rule
from rl.views.explain.series import TREND_STEPS

MEMORY_SHARE = 0.92
CODES = {
    1: (
        "a bug of Duet or of a plugin: the traceback is in the console log",
        "Report it with the log",
    ),
    2: ("the configuration", "Read the message, then `rl-train --check`"),
    3: ("the data", "Run `rl inspect`"),
    4: ("the model, or no update was finite", "Read the message; lower the learning rate"),
    5: (
        "devices, memory or disk",
        "Run `rl plan` for what the run needs, and `rl doctor` for what the machine has",
    ),
    6: ("a reward", "Read the traceback, then `rl reward test FUNCTION`"),
    76: ("another process of the run was lost", "Start all processes again: the run continues"),
}
"""Exit code -> (cause, change)."""


@stage_rule
def memory(stage: StageRecord) -> Iterator[Fault]:
    """Names memory that is nearly used up, on the devices or on the host."""
    for metric, where, change in (
        (
            "perf/device_memory_share",
            "device memory",
            f"Lower {stage.named('micro_batch')} or generator.slots, set model.remat: full; `rl "
            "plan` compares settings",
        ),
        (
            "perf/host_memory_share",
            "host memory",
            "Use fewer rewards.workers, smaller data, or a machine with more memory",
        ),
    ):
        series = stage.series(metric)
        if not series:
            continue
        left = max(1, int(stage.option("steps", stage.steps)) - series.steps[-1])
        per_step = (series.values[-1] - series.first) / max(1, series.steps[-1] - series.steps[0])
        grows = (
            len(series) >= TREND_STEPS
            and series.rises(0.9)
            and series.values[-1] >= 0.5
            and per_step > 0
        )
        soon = (1 - series.values[-1]) / per_step if grows else float("inf")
        if series.last < MEMORY_SHARE and soon > left:
            continue
        until = f", full in about {soon:.0f} steps" if soon <= left else ""
        yield Fault(
            f"{series.last:.0%} of the {where} is in use{until} ({metric})",
            cause="A longer batch, or growth, ends the run with exit code 5 or a kill by the "
            "system",
            change=change,
            name="memory near its end",
            stage=stage.name,
            step=series.since(lambda value: value >= MEMORY_SHARE) or series.steps[-1],
            severity=0.77,
            level="warn",
        )


@run_rule
def failed(run: RunRecord) -> Iterator[Fault]:
    """Names the exit code of the last attempt, if it failed."""
    code = run.ends[-1] if run.ends else 0
    if code in CODES:
        cause, change = CODES[code]
        yield Fault(
            "the last attempt failed",
            cause=f"The reason is {cause}",
            change=change,
            name=f"exit code {code}",
            severity=0.99,
            level="warn",
        )
    elif code == 75:
        yield Fault(
            "the last attempt was asked to stop",
            cause="Its state is saved",
            change=f"`rl-train {quoted(run.path)}` continues it",
            name="interrupted",
            severity=0.1,
            level="note",
        )


@run_rule
def damaged(run: RunRecord) -> Iterator[Fault]:
    """Names lines of the record that cannot be read."""
    if run.damaged:
        lines = ", ".join(map(str, run.damaged[:5]))
        yield Fault(
            f"{len(run.damaged)} lines of events.jsonl cannot be read (lines {lines})",
            cause="The verdict leaves them out",
            change="Check the disk; delete these lines to continue the run",
            name="damaged record",
            severity=0.3,
            level="warn",
        )
