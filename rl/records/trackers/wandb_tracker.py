"""Logs the steps of a run to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from rl.config.run import RunConfig, WandbOptions
from rl.records.trackers.mirror import Metrics, StageSteps, numbers


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
        self._run.log({"stage": stage, **numbers(metrics)}, step=self._stages[stage].before + step)

    def note(self, text: str) -> None:
        pass

    def truncate_after(self, stage: str, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
