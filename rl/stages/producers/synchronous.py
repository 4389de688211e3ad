"""The producer of synchronous sampling: the policy completes the next prompts before each step."""

from __future__ import annotations

from dataclasses import replace

from rl.stages.producers.interface import Producer
from rollout.collect import Rollouts


class Synchronous(Producer):
    """Draws the next prompts of the stage's data, in shuffled order or by the curriculum, and
    completes them with the current weights. It keeps nothing from step to step but the counts in
    `Progress`."""

    def take(self, count: int) -> Rollouts:
        """Returns `count` groups of `samples_per_prompt` trajectories."""
        stage = self._stage
        progress = stage.context.progress
        rows = stage.draw_examples(count)  # indices in the data
        # Prompt ids seed the random draws. They go on through the run: a prompt that comes again is
        # drawn differently.
        prompt_ids = range(progress.next_prompt_id, progress.next_prompt_id + count)
        progress.next_prompt_id += count
        with stage.context.timeline.span("data"):
            problems = stage.rows.take(rows)
        params = stage.sampling_params(n=stage.options.samples_per_prompt)
        rollouts = stage.collect(problems, params, prompt_ids)
        groups = [replace(group, row=row) for group, row in zip(rollouts.groups, rows, strict=True)]
        return replace(rollouts, groups=groups)
