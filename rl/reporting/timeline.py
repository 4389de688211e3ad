"""When a run does what: `timeline.json` in its folder, and recordings of jax's profiler.

The file is a list of complete events in the Trace Event Format, for ui.perfetto.dev and chrome://tracing, which want no bracket at
its end: a run that is continued goes on writing it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from policy.mesh import processes
from rewards.workers.pool import Call
from rl.config.run import ProfileOptions
from rl.errors import no_room

FILE, PROFILES = "timeline.json", "profile"
_LOG = logging.getLogger("duet.timeline")
RUN, CHECKPOINTS, WORKERS = range(3)
"""Rows of the file: what the run does, the writing of checkpoints beside it, and from the third on a row for each worker of its
rewards."""
_ROWS = {RUN: "run", CHECKPOINTS: "checkpoints"}


@dataclass
class Span:
    """`seconds` that it took, once it is over."""

    seconds: float = 0.0


class Timeline:
    """Spans of the run, one within another on each row. Of several processes the first writes; each records a profile of its own
    devices. Spans may end in several threads."""

    def __init__(self, directory: Path, profile: ProfileOptions | None):
        self._steps = range(profile.steps[0], profile.steps[1] + 1) if profile else range(0)
        self._profiles, self._recording = directory / PROFILES, False
        self._file, self._size = _opened(directory / FILE) if processes.first() else (None, 0)
        self._named: set[int] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, name: str, row: int = RUN, **details: str | int) -> Iterator[Span]:
        """A part of the run, also by this name in a profile; `details` are shown with it."""
        found, at, began = Span(), time.time(), time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield found
        finally:
            found.seconds = time.perf_counter() - began
            self.past(name, at, found.seconds, row, **details)

    def past(self, name: str, began: float, seconds: float, row: int = RUN, **details: str | int) -> None:
        """A span that is over; `began`: as time.time() gives it."""
        place = {"pid": 0, "tid": row}
        with self._lock:
            if row not in self._named:
                self._named.add(row)
                called = _ROWS.get(row, f"rewards {row - WORKERS}")
                self._write({"name": "thread_name", "ph": "M", **place, "args": {"name": called}})
            self._write({"name": name, "ph": "X", "ts": began * 1e6, "dur": seconds * 1e6, **place, "args": details})

    def calls(self, calls: Sequence[Call]) -> None:
        """Calls of rewards, each on the row of its worker. Those of other machines are placed by the clocks of these."""
        for call in calls:
            self.past(call.function, call.began, call.seconds, WORKERS + call.worker, completions=call.completions)

    @contextlib.contextmanager
    def step(self, stage: str, number: int) -> Iterator[Span]:
        """A step, recorded if the configuration says so."""
        if number in self._steps and not self._recording:
            with _if_there_is_room(self._profiles):
                jax.profiler.start_trace(self._profiles)
                self._recording = True
        try:
            with (
                jax.profiler.StepTraceAnnotation(stage, step_num=number),
                self.span("step", stage=stage, step=number) as whole,
            ):
                yield whole
        finally:
            if number + 1 not in self._steps:
                self._stop()

    def close(self) -> None:
        self._stop()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            with _if_there_is_room(self._profiles):
                jax.profiler.stop_trace()

    def _write(self, event: dict) -> None:
        """Appends a line, or nothing on a full disk, of which events and checkpoints tell."""
        if self._file is None:
            return
        line = (json.dumps(event) + ",\n").encode()
        with contextlib.suppress(OSError):
            if os.write(self._file, line) == len(line):
                self._size += len(line)
                return
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)


@contextlib.contextmanager
def _if_there_is_room(directory: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        _LOG.error("%s: no profile is recorded: %s", directory, error)


def _opened(path: Path) -> tuple[int | None, int]:
    """(the file, to write whole lines at its end, and its size); what a killed process left of a line is cut off. None on a full
    disk."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(file, size)
        if not size:
            size = os.write(file, b"[\n")
    except OSError as error:
        if not no_room(error):
            raise
        return None, 0
    return file, size
