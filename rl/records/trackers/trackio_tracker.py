"""Logs the steps of a run to Trackio: files in the run's folder, or a Space of the Hugging Face
hub."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config.run import RunConfig, TrackioOptions
from rl.records.trackers.sender import Point


class Trackio:
    """A run of Trackio, which a continued run continues. Trackio knows it by its name, which the
    file trackio-id of the folder holds."""

    def __init__(self, config: RunConfig, options: TrackioOptions, directory: Path):
        self._config = config
        self._options = options
        self._file = directory / "trackio-id"
        self._run: Any = None
        self._name = ""
        if "TRACKIO_DIR" not in os.environ:  # Trackio reads it when it is imported
            os.environ["TRACKIO_DIR"] = str(directory.absolute() / "trackio")

    def open(self) -> int:
        import trackio

        known = self._file.exists()
        first = self._options.name or self._file.parent.name
        name = self._file.read_text() if known else f"{first}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=self._options.project,
            name=name,
            space_id=self._options.space,
            config=self._config.model_dump(mode="json"),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        last = self._run._next_step - 1  # no public name; that of the Space, if there is one
        if known and last < 0 and self._run.url is not None:
            # Trackio says -1 also if the Space cannot be reached.
            raise ConnectionError(f"{self._run.url} does not say which steps it has")
        self._name = name
        return last

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"stage": point.stage, **point.metrics}, step=point.at)
        if not self._file.exists():  # from here on the run has steps
            self._file.write_text(self._name)

    def close(self, finished: bool) -> None:
        self._run.finish()
