"""Declares what shows the events of a run elsewhere, and numbers the steps of all stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl.config.run import RunConfig

Metrics = Mapping[str, "float | int | None"]


class Mirror(Protocol):
    """What shows the events of a run elsewhere: the console or a tracker. `Events` calls
    these methods in its own methods of the same names."""

    def start_stage(self, name: str, steps: int, first_step: int) -> None: ...

    def step(self, stage: str, step: int, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def truncate_after(self, stage: str, step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StageSteps:
    """The steps of a stage within its run.

    steps: how many it has.
    before: number of its step 0 (the evaluation before its first step), counted over all stages.
    """

    steps: int
    before: int


def stage_steps(config: RunConfig) -> dict[str, StageSteps]:
    """Returns stage name -> its steps; equal for a continued run."""
    stages = {}
    before = 0
    for name, stage in zip(config.stage_names, config.stages, strict=True):
        stages[name] = StageSteps(stage.total_steps, before)
        before += stage.total_steps + 1
    return stages


def numbers(metrics: Metrics) -> dict[str, float]:
    """Returns the metrics that were measured and are finite."""
    return {
        name: value for name, value in metrics.items() if value is not None and math.isfinite(value)
    }
