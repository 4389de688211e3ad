"""The rows that a step draws from its data, and the optimiser updates of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from rl.data import datasets
from rl.data.prepare import Stage
from rl.training.batch import Batch
from rl.training.flops import rates
from rl.training.trainer import RunState, Trainer

if TYPE_CHECKING:
    from rl.run.state import Run


def _next(run: Run, stage: Stage, rows: int) -> list[int]:
    """The rows of the next `prompts_per_step` examples; every stage goes through the data in an order of its own."""
    first, count = run.progress.drawn, stage.options.prompts_per_step
    run.progress.drawn += count
    return [
        datasets.order(run.config.seed * 1000 + stage.index, rows, number) for number in range(first, first + count)
    ]


def _update(run: Run, trainer: Trainer, state: RunState, batch: Batch, **how) -> tuple[RunState, dict]:
    """`updates_per_step` updates, each on an equal part of the rows; metrics are their means. The model sees the new weights at
    once: they are the same arrays."""
    every, updates, progress, done = [], trainer.stage.updates_per_step, run.progress, trainer.done
    rows = len(batch.prompt) // updates
    controls = dict(progress.controls)
    with run.timeline.span("updates") as updating:
        for u in range(updates):
            state, metrics = trainer.update(
                state, batch.rows(slice(u * rows, (u + 1) * rows)), controls=progress.controls, **how
            )
            run.model.params = state.policy.params
            progress.version += not how.get("critic_only")
            if controls and not how.get("critic_only"):  # what the next update is given depends on what this one found
                metrics = jax.device_get(metrics)
                progress.controls = trainer.algorithm.controlled(progress.controls, metrics)
            every.append(metrics)
        every = jax.device_get(every)
    means = {key: float(np.mean([metrics[key] for metrics in every])) for key in every[0]}
    means |= {"time/update": updating.seconds, "perf/step_tokens": float(batch.real)}
    means |= rates("train", trainer.done - done, batch.real, updating.seconds, run.model.graph.layout)
    return state, controls | means
