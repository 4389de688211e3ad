"""Metrics on data that a stage does not train on: those of the policy on the problems of an
evaluation (`evaluation`), and the loss of the stage on held-out rows (`held_out`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.run.state import Run
from rl.run.steps.until import is_reached
from rl.stages.held_out.loss import HeldOutLoss
from rl.stages.sampling.evaluation import Evaluation
from rl.stages.stage import StageKind

if TYPE_CHECKING:
    from rl.stages.stage import StageState


class HeldOutMetrics:
    """The evaluation and the held-out loss of a stage, of those that its configuration asks for."""

    def __init__(self, run: Run, stage: StageKind):
        """Computes nothing yet. The stage has started in the run."""
        self._run = run
        self._stage = stage
        both = (stage.evaluation(run.evaluation_problems), HeldOutLoss.of(stage))
        self._kinds = [each for each in both if each is not None]

    def before_first_step(self, state: StageState) -> None:
        """Writes the metrics of both kinds to the events, as step 0; nothing if the stage has
        none."""
        metrics: dict[str, float] = {}
        for kind in self._kinds:
            self._add(kind, state, 0, metrics)
        if metrics:
            self._run.events.step(self._stage.name, 0, metrics)

    def after_step(self, state: StageState, step: int, metrics: dict[str, float]) -> bool:
        """Adds to the metrics of a step the held-out metrics that are due after it. Both kinds are
        due where the stage ends.

        Returns whether `until` ends the stage here: a metric of the step or a held-out one reaches
        its bound.
        """
        options = self._stage.options
        until_reached = is_reached(options.until, metrics)
        self._take_settings()
        left = self._kinds
        # `options.steps` is the count in force at this step, not that of a later extension: a
        # resumed run evaluates after the same steps as a fresh one.
        while due := [
            each
            for each in left
            if until_reached or step == options.steps or is_due(step, each.every)
        ]:
            for kind in due:
                self._add(kind, state, step, metrics)
            left = [each for each in left if each not in due]
            until_reached = until_reached or is_reached(options.until, metrics)
        return until_reached

    def _take_settings(self) -> None:
        """Gives the evaluation the settings that hold now: a run that goes on may change them."""
        for kind in self._kinds:
            if isinstance(kind, Evaluation):
                options = self._stage.config.evaluation
                assert options is not None
                kind.options = options

    def _add(
        self,
        kind: Evaluation | HeldOutLoss,
        state: StageState,
        step: int,
        metrics: dict[str, float],
    ) -> None:
        """Adds the metrics of one kind after a step."""
        if isinstance(kind, HeldOutLoss):
            metrics |= kind.run(state)
            return
        timeline = self._run.timeline
        with (
            self._run.resharded() as sync,
            timeline.span("evaluation", stage=self._stage.name, step=step),
        ):
            metrics |= kind.run(step)
        # `time/sync` is a part of `time/step`, which an evaluation is not.
        metrics["time/eval"] += sync.get("time/sync", 0.0)


def is_due(step: int, every: int) -> bool:
    """Whether something that follows `every` steps is due after this one, counted from 1; 0: it
    never is."""
    return bool(every) and step % every == 0
