"""Creates the mirrors of a run: the console, and the trackers that its configuration names.

A mirror that fails warns once and is then left out. It never stops a run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rl.config.run import RunConfig
from rl.records.run_files import EVENTS
from rl.records.trackers.console import LiveConsole, PlainConsole
from rl.records.trackers.mirror import Metrics, Mirror, stage_steps
from rl.records.trackers.mlflow_tracker import MLflow
from rl.records.trackers.sender import Sender, Tracker
from rl.records.trackers.tensorboard_tracker import TensorBoard
from rl.records.trackers.trackio_tracker import Trackio
from rl.records.trackers.wandb_tracker import Wandb


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
    sent: list[tuple[str, Tracker]] = []
    if config.run.mlflow is not None:
        sent.append(("MLflow", MLflow(config, config.run.mlflow, directory)))
    if config.run.trackio is not None:
        sent.append(("Trackio", Trackio(config, config.run.trackio, directory)))
    for name, tracker in sent:
        guarded.append(_Guarded(name, partial(Sender, tracker, stages, directory / EVENTS)))
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
