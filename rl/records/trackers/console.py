"""Shows the steps of a run on the console."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rl.records.trackers.mirror import Metrics, StageSteps

if TYPE_CHECKING:
    from rich.progress import TaskID

_SHOWN = (
    "reward/mean",
    "eval/greedy_accuracy",
    "kl/ref",
    "entropy",
    "completion/mean_length",
    "reward/frac_zero_std",
    "sampler/logp_diff_max",
    "rewards/accuracies",
    "reward_model/accuracy",
    "value/loss",
    "held_out/rewards/accuracies",
    "held_out/reward_model/accuracy",
    "held_out/loss",
    "optim/grad_norm",
    "loss",
)
"""Metrics in a line of the console, in this order. The loss is last: under GRPO its value is near 0
by construction."""


def line(stage: str, step: int, steps: int, metrics: Metrics) -> str:
    """Returns a line for the console: `grpo 12/250  reward/mean 0.412  kl/ref 0.001  0.4s`."""
    return "  ".join([f"{stage} {step}/{steps}", *_shown(metrics)])


def _shown(metrics: Metrics) -> list[str]:
    """Returns name and value of the metrics in a line of the console, in its order, and the time of
    the step."""
    parts = [
        f"{name} {_short(value)}" for name in _SHOWN if (value := metrics.get(name)) is not None
    ]
    passes = [
        (name, value)
        for name, value in metrics.items()
        if name.startswith(("eval/pass@", "eval/maj@")) and value is not None
    ]
    parts += [f"{name} {_short(value)}" for name, value in passes]
    if metrics.get("time/step") is not None:
        parts.append(f"{metrics['time/step']:.1f}s")
    return parts


def fitting(parts: Sequence[str], width: int) -> str:
    """Joins the first parts that fit in a line of `width` columns. No part is cut."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


class PlainConsole:
    """Prints a line every `log_every()` steps, for each step with an evaluation, and for the last
    step."""

    def __init__(self, stages: Mapping[str, StageSteps], log_every: Callable[[], int]):
        self._stages = stages
        self._every = log_every

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self.note(
            f"stage {name}: {steps} steps"
            + (f", going on after {first_step}" if first_step else "")
        )

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        steps = self._stages[stage].steps
        if step % self._every() == 0 or step == steps or _evaluated(metrics):
            print(line(stage, step, steps, metrics), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def truncate_after(self, stage: str, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class LiveConsole:
    """Shows two lines in a terminal: bar, steps and time left of the stage; and as many metrics as
    fit.

    Steps with an evaluation, and notes, scroll above them.
    """

    def __init__(self, stages: Mapping[str, StageSteps], log_every: Callable[[], int]):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        live = self
        console = Console()

        class TwoLines(Progress):
            def get_renderables(self):
                yield self.make_tasks_table(self.tasks)
                yield Text(fitting(live._metrics, console.width))

        self._stages = stages
        self._every = log_every
        self._metrics: list[str] = []
        self._progress = TwoLines(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._task(name, first_step)

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        task = self._task(stage)
        steps = self._stages[stage].steps
        if _evaluated(metrics):
            self.note(line(stage, step, steps, metrics))
        if step % self._every() == 0 or step == steps:
            self._metrics = _shown(metrics)
            self._progress.update(task, completed=step)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def truncate_after(self, stage: str, step: int) -> None:
        pass

    def close(self) -> None:
        self._progress.stop()

    def _task(self, stage: str, first_step: int = 0) -> TaskID:
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._progress.stop_task(task)
            self._progress.start()
            self._tasks[stage] = self._progress.add_task(
                stage, total=self._stages[stage].steps, completed=first_step
            )
        return self._tasks[stage]


def _evaluated(metrics: Metrics) -> bool:
    return any(name.startswith(("eval/", "held_out/")) for name in metrics)


def _short(value: float | int) -> str:
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"
