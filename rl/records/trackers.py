"""Shows the events of a run in mirrors: the console, TensorBoard, Weights & Biases.

A mirror that fails warns once and is then left out. It never stops a run.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rl.config.run import RunConfig, WandbOptions

if TYPE_CHECKING:
    from rich.progress import TaskID

Metrics = Mapping[str, "float | int | None"]

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


class Mirror(Protocol):
    """What shows the events of a run elsewhere: the console, TensorBoard or Weights & Biases.
    `Events` calls these methods in its own methods of the same names."""

    def start_stage(self, name: str, steps: int, first_step: int) -> None: ...

    def step(self, stage: str, step: int, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def truncate_after(self, stage: str, step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StageSteps:
    """The steps of a stage within its run.

    steps: number of updates.
    before: number of its step 0 (the evaluation before its first update), counted over all stages.
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


def mirrors(config: RunConfig, directory: Path, log_every: Callable[[], int]) -> list[Mirror]:
    """Returns the console and the mirrors that a configuration asks for.

    log_every: steps between lines on the console from now on.
    """
    stages = stage_steps(config)
    console = LiveConsole if sys.stdout.isatty() else PlainConsole
    guarded: list[Mirror] = [_Guarded("the console", lambda: console(stages, log_every))]
    if config.run.tensorboard:
        guarded.append(
            _Guarded("TensorBoard", lambda: TensorBoard(stages, directory / "tensorboard"))
        )
    if (options := config.run.wandb) is not None:
        guarded.append(_Guarded("wandb", lambda: Wandb(stages, config, options, directory)))
    return guarded


class _Guarded:
    """A mirror that is dropped, with one warning, as soon as it fails."""

    def __init__(self, name: str, make: Callable[[], Mirror]):
        self._name = name
        self._mirror: Mirror | None = None
        try:
            self._mirror = make()
        except Exception as error:  # as in _try
            self._drop(error)

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._try(lambda mirror: mirror.start_stage(name, steps, first_step))

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        self._try(lambda mirror: mirror.step(stage, step, metrics))

    def note(self, text: str) -> None:
        self._try(lambda mirror: mirror.note(text))

    def truncate_after(self, stage: str, step: int) -> None:
        self._try(lambda mirror: mirror.truncate_after(stage, step))

    def close(self) -> None:
        self._try(lambda mirror: mirror.close())

    def _try(self, act: Callable[[Mirror], None]) -> None:
        if self._mirror is None:
            return
        try:
            act(self._mirror)
        except Exception as error:  # any error of a third party's logger, its disk or its network
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        warnings.warn(f"{self._name} failed and is left out from here on: {error!r}", stacklevel=2)
        self._mirror = None


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
        if name.startswith("eval/pass@") and value is not None
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


class TensorBoard:
    """Writes scalars for TensorBoard, with the steps of all stages numbered in sequence."""

    def __init__(self, stages: Mapping[str, StageSteps], directory: Path):
        self._stages = stages
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _writer(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter

        # A SummaryWriter has a thread and an exit handler that show tracebacks on a full disk. The
        # suffix is random because the name of the file holds the time in seconds: a run that
        # continues within a second would overwrite its file.
        return EventsWriter(
            str(self._directory / "events"), filename_suffix=f".{secrets.token_hex(4)}"
        )

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        pass

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        Event = cast(Any, event_pb2).Event  # made by protobuf at import
        at = self._stages[stage].before + step
        now = time.time()
        for name, value in _numbers(metrics).items():
            self._writer.write_event(Event(wall_time=now, step=at, summary=scalar(name, value)))
        self._writer.flush()

    def note(self, text: str) -> None:
        pass

    def truncate_after(self, stage: str, step: int) -> None:
        """Removes the scalars after `step` of `stage` from the files of earlier starts of the
        run."""
        last = self._stages[stage].before + step
        for file in sorted(self._directory.glob("events*")):
            records = file.read_bytes()
            kept = b"".join(
                record for at, record in _scalar_records(records) if at is None or at <= last
            )
            if kept != records:
                temporary = file.with_name(f"new.{file.name}")
                temporary.write_bytes(kept)
                temporary.replace(file)

    def close(self) -> None:
        if "_writer" in self.__dict__:
            self._writer.close()


def _scalar_records(data: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Yields (step of a scalar, or None; bytes of the record) of an event file, without a torn last
    record.

    A record is its length in 8 bytes, a check sum in 4, the event, and a check sum in 4 (the format
    of TFRecord).
    """
    from tensorboardX.proto import event_pb2

    start = 0
    while len(data) >= start + 12:
        length = int.from_bytes(data[start : start + 8], "little")
        end = start + 16 + length
        if end > len(data):
            return
        event = cast(Any, event_pb2).Event.FromString(data[start + 12 : start + 12 + length])
        yield (event.step if event.HasField("summary") else None), data[start:end]
        start = end


class Wandb:
    """Logs to Weights & Biases. A continued run keeps its id.

    `mode: offline` writes to the run's directory and needs no account.
    """

    def __init__(
        self,
        stages: Mapping[str, StageSteps],
        config: RunConfig,
        options: WandbOptions,
        directory: Path,
    ):
        import wandb

        self._stages = stages
        file = directory / "wandb-id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            id=file.read_text(),
            resume="allow",
            project=options.project,
            name=options.name or directory.name,
            mode=options.mode,
            dir=str(directory),
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        pass

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        self._run.log({"stage": stage, **_numbers(metrics)}, step=self._stages[stage].before + step)

    def note(self, text: str) -> None:
        pass

    def truncate_after(self, stage: str, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _evaluated(metrics: Metrics) -> bool:
    return any(name.startswith(("eval/", "held_out/")) for name in metrics)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        name: value for name, value in metrics.items() if value is not None and math.isfinite(value)
    }


def _short(value: float | int) -> str:
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"
