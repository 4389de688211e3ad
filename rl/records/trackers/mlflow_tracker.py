"""Logs the steps of a run to MLflow: a server, or a SQLite file in the run's folder."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl.config.run import MLflowOptions, RunConfig
from rl.records.trackers.sender import Point

_METRICS = 1000
_PARAMS = 100
_VALUE = 6000
_KEY = 250
"""Most metrics and parameters of a request, characters of a parameter and of a name, which MLflow
accepts."""


class MLflow:
    """A run of MLflow, which a continued run continues. The file mlflow-id of the folder holds its
    id."""

    def __init__(self, config: RunConfig, options: MLflowOptions, directory: Path):
        self._config = config
        self._options = options
        self._directory = directory
        self._client: Any = None
        self._run = ""

    def open(self) -> int:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # they announce each table of a new file
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient(self._uri())
        file = self._directory / "mlflow-id"
        known = self._known(file.read_text()) if file.exists() else None
        if known is None:
            self._run = self._create()
            file.write_text(self._run)
            return -1
        self._run = known.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        # The latest value of each metric, with its step.
        return max((each.step for each in known.to_proto().data.metrics), default=-1)

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        for request in requests(points):
            metrics = [
                Metric(name, value, round(point.time * 1000), point.at)
                for point in request
                for name, value in by_valid_name(point.metrics).items()
            ]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def _uri(self) -> str:
        if uri := self._options.uri or os.environ.get("MLFLOW_TRACKING_URI"):
            return uri
        folder = self._directory.absolute() / "mlflow"
        folder.mkdir(exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}"

    def _known(self, run: str) -> Any:
        """Returns a run of the tracker, or None if it has no such run: the address is another than
        before."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _create(self) -> str:
        """Creates the run, with the configuration as parameters, and returns its id."""
        from mlflow.entities import Param

        name = self._options.name or self._directory.name
        run = self._client.create_run(self._experiment(), run_name=name).info.run_id
        flat = flattened(self._config.model_dump(mode="json"))
        params = [Param(key[:_KEY], str(value)[:_VALUE]) for key, value in flat]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(run, params=params[first : first + _PARAMS])
        return run

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._options.experiment
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return known.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException as error:  # another run has just created it
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._client.get_experiment_by_name(name).experiment_id


def requests(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Splits points into requests of at most 1000 metrics. A store takes all of a request or none,
    and a step is in one."""
    request: list[Point] = []
    size = 0
    for point in points:
        if request and size + len(point.metrics) > _METRICS:
            yield request
            request = []
            size = 0
        request.append(point)
        size += len(point.metrics)
    if request:
        yield request


def by_valid_name(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics by names that MLflow accepts: `eval/pass@4` is `eval/pass_at_4`, and a
    character other than letters, digits and `_-./ ` becomes `_`."""
    return {_valid_name(name): value for name, value in metrics.items()}


def _valid_name(name: str) -> str:
    text = re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))
    parts = [part if part.strip(".") else "_" * len(part) for part in text.split("/") if part]
    return posixpath.join(*parts)[:_KEY] if parts else "_"


def flattened(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each leaf of a configuration that is not null."""
    children: Iterator[tuple[str | int, Any]]
    if isinstance(value, dict):
        children = iter(value.items())
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        children = iter(enumerate(value))
    else:
        if value is not None and value != {}:
            yield re.sub(r"[^\w\-./ ]", "_", key), value
        return
    for name, child in children:
        yield from flattened(child, f"{key}.{name}" if key else str(name))
