"""Records a run as append-only JSON lines, and shows them in mirrors.

events.jsonl has one object per step, `{"stage", "step", "time", "metrics": {...}}`, `time` in Unix
seconds; samples.jsonl has one per completion (rl/records/samples.py). Lines are appended in one
write per step, so that a killed process leaves at most one torn line, the last. `truncate_after`
removes it when the run continues. On a full disk lines wait in memory. The folder media/ has a
thumbnail of each picture of a sample (rl/records/thumbnails.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from policy.mesh import processes
from rewards.text import quoted
from rl.config.run import RunConfig, RunOptions, SampleRecords
from rl.errors import ResourceError, disk_room
from rl.records.append_file import AppendFile
from rl.records.json_lines import complete_lines, line
from rl.records.run_files import EVENTS
from rl.records.samples import SampleLog
from rl.records.schema import RecordedLine, SampleRecord
from rl.records.thumbnails import Thumbnails
from rl.records.trackers.mirror import Mirror
from rl.records.trackers.mirrors import mirrors

if TYPE_CHECKING:
    from rollout.media.reference import Reference

_LOG = logging.getLogger("duet.events")
Metric = float | np.generic | np.ndarray | jax.Array | None
"""A number of a step; an array has one element. None: it was not measured."""


class EventLog:
    """Appends to the files of a run's directory, and creates the directory if it does not exist."""

    def __init__(self, directory: str | Path, options: SampleRecords = SampleRecords()):
        self.directory = Path(directory)
        self.options = options
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._events = AppendFile(self.directory / EVENTS)
            self._samples = SampleLog(self.directory, max_bytes=options.keep_gib * 2**30)
        except OSError as error:
            raise ResourceError(
                f"events and samples cannot be written to {self.directory}: {error.strerror} "
                f"({disk_room(directory)})"
            ) from None

    def step(self, stage: str, step: int, metrics: Mapping[str, Metric]) -> None:
        """Writes one line of events.jsonl, with the time. Metrics are numbers, or arrays with one
        number."""
        record = {
            "stage": stage,
            "step": step,
            "time": round(time.time(), 3),
            "metrics": dict(metrics),
        }
        self._events.append(line(record).encode())

    def samples(
        self, records: Sequence[SampleRecord], tokens: Sequence[np.ndarray]
    ) -> list[SampleRecord]:
        """Writes one line of samples.jsonl per completion, and their tokens, samples.TOKEN[n] each.

        Leaves out the prompts that `run.samples.share` leaves out. Returns the records that it has
        written.
        """
        kept = [
            pair
            for pair in zip(records, tokens, strict=True)
            if self.options.keeps_prompt(pair[0]["prompt_id"])
        ]
        written = [record for record, _ in kept]
        self._samples.write(written, [own for _, own in kept])
        return written

    def truncate_after(self, stages: Sequence[str], stage: str, step: int) -> None:
        """Removes all lines after `step` of `stage`, and torn last lines, to match a checkpoint.

        `stages` lists the names of the run's stages in order. A kill leaves each file as it was or
        as it should be; the next truncation mends the rest.
        Raises ValueError for a damaged line before the last, ResourceError for a full disk.
        """
        last = (stages.index(stage), step)

        def keep(row: RecordedLine) -> bool:
            return (stages.index(row["stage"]), row["step"]) <= last

        try:
            _rewrite(self.directory / EVENTS, keep)
            self._events.reopen()
            self._samples.truncate_after(keep)
        except OSError as error:
            raise ResourceError(
                f"{self.directory}: events and samples cannot be cut back to the checkpoint: "
                f"{error.strerror}. Make "
                f"room, then `rl-train {quoted(self.directory)}` ({disk_room(self.directory)})"
            ) from None

    def keep_samples(self, keep: Callable[[RecordedLine], bool]) -> None:
        """Removes all samples after the last one that `keep` accepts, and torn last lines.

        Raises ValueError for a damaged line, ResourceError for a full disk.
        """
        try:
            _rewrite(self.directory / EVENTS, lambda row: True)
            self._events.reopen()
            self._samples.truncate_after(keep)
        except OSError as error:
            raise ResourceError(
                f"{self.directory}: events and samples cannot be cut back: {error.strerror} "
                f"({disk_room(self.directory)})"
            ) from None

    def sync(self) -> bool:
        """Writes all lines to the disk and waits for it. Returns False if the disk is full.

        Call this before a checkpoint is saved: the run can continue from it only if the lines
        before it exist.
        """
        try:
            self._samples.sync()
            self._events.sync()
        except OSError as error:
            room = disk_room(self.directory, self._events.waiting + self._samples.waiting)
            _LOG.error(
                "events and samples cannot be written to %s (%s); make room there (%s)",
                self.directory,
                error,
                room,
            )
            return False
        return True

    def rotate(self) -> None:
        """Calls `SampleLog.rotate`. On an error samples.jsonl grows on."""
        try:
            self._samples.rotate()
        except OSError as error:
            _LOG.error("%s: samples.jsonl cannot be moved to samples/ (%s)", self.directory, error)

    def close(self) -> None:
        """Writes the waiting lines if there is room. No checkpoint depends on a line that is
        lost."""
        self._events.close()
        self._samples.close()


class Events:
    """The event log and its mirrors, for the loop. Only process 0 writes."""

    def __init__(self, config: RunConfig, directory: str | Path):
        first = processes.first()
        self._options = config.run
        self.log = EventLog(directory, config.run.samples) if first else None
        self._mirrors: list[Mirror] = []
        if first:
            self._mirrors = mirrors(config, Path(directory), lambda: self._options.log_every)
        self._thumbnails = Thumbnails(Path(directory), self.note)

    def use(self, options: RunOptions) -> None:
        """Takes `log_every` and `samples` of these options from now on."""
        self._options = options
        if self.log is not None:
            self.log.options = options.samples

    def start_stage(self, name: str, steps: int, first_step: int = 0) -> None:
        """Announces that a stage of `steps` steps begins, or continues after step `first_step`."""
        for mirror in self._mirrors:
            mirror.start_stage(name, steps, first_step)

    def step(self, stage: str, step: int, metrics: Mapping[str, Metric]) -> None:
        """Records the metrics of one step."""
        if self.log is None:
            return
        numbers = {key: number(value) for key, value in metrics.items()}
        self.log.step(stage, step, numbers)
        for mirror in self._mirrors:
            mirror.step(stage, step, numbers)

    def samples(
        self,
        records: Sequence[SampleRecord],
        tokens: Sequence[np.ndarray],
        references: Sequence[Reference] = (),
    ) -> None:
        """Records completions (rl/stages/sampling/records.py), their tokens, and
        thumbnails of their pictures.

        references: pictures and sounds of the prompts; those of prompts that are not recorded are
        left out.
        """
        if self.log is None:
            return
        written = self.log.samples(records, tokens)
        digests = {item.get("digest") for record in written for item in record.get("media", ())}
        self._thumbnails.write([each for each in references if each.digest in digests])

    def note(self, text: str) -> None:
        """Shows a line in the mirrors. The record does not contain it."""
        for mirror in self._mirrors:
            mirror.note(text)

    def truncate_after(self, stages: Sequence[str], stage: str, step: int) -> None:
        """Calls `EventLog.truncate_after`, and that of the mirrors."""
        if self.log is not None:
            self.log.truncate_after(stages, stage, step)
        for mirror in self._mirrors:
            mirror.truncate_after(stage, step)

    def sync(self) -> bool:
        """Waits for thumbnails, calls `EventLog.sync` and returns its result on all processes."""
        self._thumbnails.wait()
        return processes.broadcast(self.log is not None and self.log.sync())

    def rotate(self) -> None:
        """Moves full files of samples to samples/. Call it after a checkpoint."""
        if self.log is not None:
            self.log.rotate()

    def close(self) -> None:
        """Closes the mirrors and the log, after waiting for thumbnails."""
        self._thumbnails.close()
        for mirror in self._mirrors:
            mirror.close()
        if self.log is not None:
            self.log.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns the complete lines of an event or sample file, without a torn last line. Raises
    ValueError for damage."""
    return [json.loads(each) for each in complete_lines(Path(path))]


def number(value: Metric) -> float | int | None:
    """Converts a metric, also a numpy or jax scalar, to a Python number; None stays None."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return value.item()


def _rewrite(path: Path, keep: Callable[[RecordedLine], bool]) -> None:
    """Replaces a file by its complete lines that `keep` accepts."""
    lines = [each for each in complete_lines(path) if keep(json.loads(each))]
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
