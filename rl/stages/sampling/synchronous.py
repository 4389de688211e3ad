"""The producer of synchronous sampling: the policy completes the next prompts before each step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


class Synchronous:
    """Draws the next prompts of the stage's data, in shuffled order or by the curriculum, and
    completes them with the current weights. It keeps nothing from step to step but the counts in `Progress`."""

    generates = True
    on_policy = True

    def __init__(self, stage: StageKind):
        self._stage = stage

    def check(self) -> None:
        pass

    def take(self, count: int) -> Rollouts:
        """Returns `count` groups of `samples_per_prompt` trajectories."""
        stage = self._stage
        progress = stage.context.progress
        rows = stage.draw_examples(stage.examples, count)  # indices in the data
        # Numbers for the random draws. They go on through the run: a prompt that comes again is
        # drawn differently.
        ids = range(progress.next_prompt_id, progress.next_prompt_id + count)
        progress.next_prompt_id += count
        with stage.context.timeline.span("data"):
            problems = stage.rows.take(rows)
        params = stage.sampling_params(n=stage.options.samples_per_prompt)
        rollouts = stage.collect(problems, params, ids)
        groups = [replace(group, row=row) for group, row in zip(rollouts.groups, rows, strict=True)]
        return replace(rollouts, groups=groups)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
