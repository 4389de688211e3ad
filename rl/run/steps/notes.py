"""Notes for the console after the steps of a stage."""

from __future__ import annotations

from collections.abc import Mapping

from rl.run.compilation import BackgroundNotes
from rl.run.health.equal_rewards import EqualRewards
from rl.run.state import Run
from rl.run.steps.remaining_time import RemainingTime
from rl.stages.stage import StageKind


class StepNotes:
    """The remaining time of a stage, groups of equal rewards, and programs that are still to be
    compiled, each noted when it can first be said."""

    def __init__(self, run: Run, stage: StageKind, resumed: bool):
        """Notes nothing yet. resumed: whether earlier steps of the stage were made by another
        process, so that their rewards are unknown."""
        self._run = run
        self._remaining_time = RemainingTime()
        self._equal_rewards = EqualRewards(stage, fresh=not resumed)
        self._compilation = BackgroundNotes()

    def after_step(self, metrics: Mapping[str, float], left: int) -> None:
        """Takes the metrics of a step, after which `left` steps of the stage follow."""
        remaining_time = self._remaining_time.after_step(metrics, left)
        programs_left = self._run.generator.engine.runner.programs_left
        for text in (
            remaining_time if left else None,
            self._equal_rewards.after_step(metrics),
            self._compilation.after_step(programs_left),
        ):
            if text:
                self._run.events.note(text)
