"""Records a run as append-only JSON lines, and shows them in mirrors.

events.jsonl has one object per step, `{"stage", "step", "metrics": {...}}`; samples.jsonl has one per completion. Both
are strict JSON: a number that is not finite is written as null. Every line is one write, so that a killed process
leaves at most one torn line, the last. `truncate_after` removes it when the run continues. On a full disk lines wait in
memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from policy.mesh import processes
from rl.config.run import RunConfig
from rl.errors import ResourceError
from rl.reporting.trackers import Mirror, mirrors

EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
_LOG = logging.getLogger("duet.events")


class EventLog:
    """Appends to the two files of a run's directory, and creates the directory if it does not exist."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: self._open(name) for name in (EVENTS, SAMPLES)}
        except OSError as error:
            raise ResourceError(f"events and samples cannot be written to {self.directory}: {error.strerror}") from None
        self._waiting = dict.fromkeys(self._files, b"")

    def step(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line of events.jsonl. Metrics are numbers, or arrays with one number."""
        self._write(EVENTS, [{"stage": stage, "step": step, "metrics": dict(metrics)}])

    def samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line of samples.jsonl per completion, all in one write."""
        self._write(SAMPLES, records)

    def truncate_after(self, stages: Sequence[str], stage: str, step: int) -> None:
        """Removes all lines after `step` of `stage`, and torn last lines, to match a checkpoint.

        `stages` lists the names of the run's stages in order. Each file is replaced atomically, so that a kill leaves
        the old file or the new one. Raises ValueError for a damaged line before the last, ResourceError for a full
        disk.
        """
        last = (stages.index(stage), step)
        for name, file in self._files.items():
            try:
                _rewrite(self.directory / name, lambda row: (stages.index(row["stage"]), row["step"]) <= last)
                self._files[name] = self._open(name)
            except OSError as error:
                raise ResourceError(
                    f"{self.directory / name} cannot be cut back to the checkpoint: {error.strerror}. Make room, then "
                    f"`rl-train {self.directory}`"
                ) from None
            _close(file)

    def sync(self) -> bool:
        """Writes all lines to the disk and waits for it. Returns False if the disk is full.

        Call this before a checkpoint is saved: the run can continue from it only if the lines before it exist.
        """
        try:
            for name, file in self._files.items():
                self._flush(name, file)
                os.fsync(file)
        except OSError as error:
            _LOG.error("events and samples cannot be written to %s (%s); make room there", self.directory, error)
            return False
        return True

    def close(self) -> None:
        """Writes the waiting lines if there is room. No checkpoint depends on a line that is lost."""
        while self._files:
            name, file = self._files.popitem()
            with contextlib.suppress(OSError):
                self._flush(name, file)
            _close(file)

    def _open(self, name: str) -> int:
        return os.open(self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        waited = bool(self._waiting[name])
        self._waiting[name] += "".join(_line(record) for record in records).encode()
        try:
            self._flush(name, self._files[name])
        except OSError as error:
            if not waited:
                _LOG.error(
                    "%s cannot be written: %s. Its lines are kept in memory; make room", self.directory / name, error
                )

    def _flush(self, name: str, file: int) -> None:
        while self._waiting[name]:
            self._waiting[name] = self._waiting[name][os.write(file, self._waiting[name]) :]


class Events:
    """The event log and its mirrors, for the loop. Only process 0 writes."""

    def __init__(self, config: RunConfig, directory: str | Path):
        first = processes.first()
        self.log = EventLog(directory) if first else None
        self._mirrors: list[Mirror] = mirrors(config, Path(directory)) if first else []

    def start_stage(self, name: str, steps: int, first_step: int = 0) -> None:
        """Announces that a stage of `steps` steps begins, or continues after step `first_step`."""
        for mirror in self._mirrors:
            mirror.start_stage(name, steps, first_step)

    def step(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the metrics of one step."""
        if self.log is None:
            return
        numbers = {key: number(value) for key, value in metrics.items()}
        self.log.step(stage, step, numbers)
        for mirror in self._mirrors:
            mirror.step(stage, step, numbers)

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Records completions: stage, step, prompt_id, sample, prompt, completion, tokens, finish, rewards, ..."""
        if self.log is not None:
            self.log.samples(records)

    def note(self, text: str) -> None:
        """Shows a line in the mirrors. The record does not contain it."""
        for mirror in self._mirrors:
            mirror.note(text)

    def truncate_after(self, stages: Sequence[str], stage: str, step: int) -> None:
        """Calls `EventLog.truncate_after`."""
        if self.log is not None:
            self.log.truncate_after(stages, stage, step)

    def sync(self) -> bool:
        """Calls `EventLog.sync` and returns its result on all processes."""
        return processes.broadcast(self.log is not None and self.log.sync())

    def close(self) -> None:
        """Closes the mirrors and the log."""
        for mirror in self._mirrors:
            mirror.close()
        if self.log is not None:
            self.log.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns the complete lines of an event or sample file, without a torn last line. Raises ValueError for damage."""
    return [json.loads(line) for line in _complete_lines(Path(path))]


def number(value: Any) -> float | int | None:
    """Converts a metric, also a numpy or jax scalar, to a Python number; None stays None."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return value.item()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    """Converts a value for strict JSON: arrays become lists, numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    if isinstance(value, str):
        # A byte-level model can write half of a surrogate pair, which has no UTF-8.
        return value.encode("utf-8", "replace").decode()
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file without a torn last line. Raises ValueError for damage before the last line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for index, line in enumerate(lines):
        try:
            complete = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except ValueError:
            complete = False
        if not complete:
            if index < len(lines) - 1:
                raise ValueError(f"{path}:{index + 1}: damaged line; mend or delete it to go on")
            return lines[:index]
    return lines


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Replaces a file by its complete lines that `keep` accepts."""
    lines = [line for line in _complete_lines(path) if keep(json.loads(line))]
    temporary = path.with_suffix(".jsonl.new")
    try:
        with temporary.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _close(file: int) -> None:
    with contextlib.suppress(OSError):  # an error of a full disk has been reported by the write or sync
        os.close(file)
