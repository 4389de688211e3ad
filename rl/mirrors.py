"""Where the events of a run are shown besides events.jsonl: the console, TensorBoard, Weights & Biases.

A mirror that fails says so once and is left out from then on; it never stops a run.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rl.config import RunConfig, WandbOptions

Metrics = Mapping[str, "float | int | None"]

_SHOWN = (
    "reward/mean",
    "eval/greedy_accuracy",
    "kl/ref",
    "entropy",
    "completion/mean_length",
    "reward/frac_zero_std",
    "sampler/logp_diff_max",
    "value/loss",
    "optim/grad_norm",
    "loss",
)
"""Metrics of a line on the console, in this order. A loss is last: under GRPO its value is near 0 by construction."""


class Mirror(Protocol):
    """What a mirror is told."""

    def start_stage(self, name: str, steps: int, first_step: int) -> None: ...

    def step(self, stage: str, step: int, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def mirrors(config: RunConfig, directory: Path) -> list[Mirror]:
    """The mirrors that a configuration asks for; the console always."""
    console = LiveConsole(config.run.log_every) if sys.stdout.isatty() else PlainConsole(config.run.log_every)
    wanted = [console]
    if config.run.tensorboard:
        wanted.append(_Guarded("TensorBoard", lambda: TensorBoard(directory / "tensorboard")))
    if config.run.wandb is not None:
        wanted.append(_Guarded("wandb", lambda: Wandb(config.run.wandb, config, directory)))
    return wanted


class _Guarded:
    """A mirror that is dropped, with one warning, as soon as it fails."""

    def __init__(self, name: str, make):
        self._name = name
        self._mirror: Mirror | None = None
        self._try(lambda: setattr(self, "_mirror", make()))

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._try(lambda: self._mirror.start_stage(name, steps, first_step))

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._mirror.step(stage, step, metrics))

    def note(self, text: str) -> None:
        self._try(lambda: self._mirror.note(text))

    def close(self) -> None:
        self._try(lambda: self._mirror.close())

    def _try(self, act) -> None:
        if self._name is None:
            return
        try:
            act()
        except Exception as error:  # whatever a third party's logger, its disk or its network raises
            warnings.warn(f"{self._name} failed and is left out from here on: {error!r}", stacklevel=2)
            self._name = None


def line(stage: str, step: int, steps: int, metrics: Metrics) -> str:
    """`grpo 12/250  reward/mean 0.412  kl/ref 0.001  0.4s`."""
    parts = [f"{stage} {step}/{steps}"]
    parts += [f"{name} {_short(metrics[name])}" for name in _SHOWN if metrics.get(name) is not None]
    parts += [f"{name} {_short(value)}" for name, value in metrics.items() if name.startswith("eval/pass@")]
    if metrics.get("time/step") is not None:
        parts.append(f"{metrics['time/step']:.1f}s")
    return "  ".join(parts)


class PlainConsole:
    """One line every `log_every` steps, and for each step that evaluated and the last."""

    def __init__(self, log_every: int):
        self._every = log_every
        self._steps = 0

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._steps = steps
        self.note(f"stage {name}: {steps} steps" + (f", going on after {first_step}" if first_step else ""))

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        if step % self._every == 0 or step == self._steps or any(name.startswith("eval/") for name in metrics):
            print(line(stage, step, self._steps, metrics), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class LiveConsole:
    """A progress bar for a terminal; steps that evaluated, and notes, scroll above it."""

    def __init__(self, log_every: int):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._every = log_every
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
        )
        self._task = None
        self._steps = 0

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._progress.start()
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._steps = steps
        self._task = self._progress.add_task(name, total=steps, completed=first_step, shown="")

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        text = line(stage, step, self._steps, metrics)
        if any(name.startswith("eval/") for name in metrics):
            self.note(text)
        if step % self._every == 0 or step == self._steps:
            self._progress.update(self._task, completed=step, shown=text.partition("  ")[2])

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class TensorBoard:
    """Scalars at the running number of the step over all stages."""

    def __init__(self, directory: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory))
        self._count = _Counter()

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._count.start_stage(steps)

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, self._count(step))
        self._writer.flush()

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run; `mode: offline` writes to the run's directory and needs no account."""

    def __init__(self, options: WandbOptions, config: RunConfig, directory: Path):
        import wandb

        self._run = wandb.init(
            project=options.project,
            name=options.name or directory.name,
            mode=options.mode,
            dir=str(directory),
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._count = _Counter()

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._count.start_stage(steps)

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        self._run.log({"stage": stage, **_numbers(metrics)}, step=self._count(step))

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class _Counter:
    """Turns the step of a stage into a number that goes on through all stages: step 0 of a stage, where it is evaluated
    before its first update, comes after the last step of the stage before."""

    def __init__(self):
        self._before = 0
        self._steps = 0

    def start_stage(self, steps: int) -> None:
        self._before += self._steps
        self._steps = steps + 1

    def __call__(self, step: int) -> int:
        return self._before + step


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _short(value: float | int) -> str:
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"
