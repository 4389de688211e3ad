"""Records when a run does what: `timeline.json` in its folder, and profiles of jax's profiler.

The file is a list of complete events in the Trace Event Format, for ui.perfetto.dev and
chrome://tracing. Its closing bracket is optional, so that a continued run can append to it.
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
from rewards.workers.threads import Call
from rl.config.run import ProfileOptions
from rl.errors import no_room

FILE = "timeline.json"
PROFILES = "profile"
_LOG = logging.getLogger("duet.timeline")
RUN, CHECKPOINTS, WORKERS = range(3)
"""Rows of the file: the run, the writing of checkpoints in the background, and one row per reward
worker."""
_ROWS = {RUN: "run", CHECKPOINTS: "checkpoints"}


@dataclass
class Span:
    """A span of the timeline. `seconds` is its duration once it has ended."""

    seconds: float = 0.0


class Timeline:
    """Writes the spans of a run; the spans of a row nest.

    Process 0 writes the file. Each process records a profile of its own devices. Spans may end in
    several threads.
    """

    def __init__(self, directory: Path, profile: ProfileOptions | None):
        self._steps = range(profile.steps[0], profile.steps[1] + 1) if profile else range(0)
        self._profiles = directory / PROFILES
        self._recording = False
        self._file, self._size = _open(directory / FILE) if processes.first() else (None, 0)
        self._named: set[int] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, name: str, row: int = RUN, **details: str | int) -> Iterator[Span]:
        """Records a part of the run under this name, also in a profile. Viewers show `details` with
        it."""
        span = Span()
        at = time.time()
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield span
        finally:
            span.seconds = time.perf_counter() - began
            self.past(name, at, span.seconds, row, **details)

    def past(
        self, name: str, began: float, seconds: float, row: int = RUN, **details: str | int
    ) -> None:
        """Records a span that has ended. `began`: its start as time.time() returns it."""
        place = {"pid": 0, "tid": row}
        with self._lock:
            if row not in self._named:
                self._named.add(row)
                title = _ROWS.get(row, f"rewards {row - WORKERS}")
                self._write({"name": "thread_name", "ph": "M", **place, "args": {"name": title}})
            self._write(
                {
                    "name": name,
                    "ph": "X",
                    "ts": began * 1e6,
                    "dur": seconds * 1e6,
                    **place,
                    "args": details,
                }
            )

    def calls(self, calls: Sequence[Call]) -> None:
        """Records calls of rewards, each on the row of its worker, with the times of the clock of
        its machine."""
        for call in calls:
            self.past(
                call.function,
                call.began,
                call.seconds,
                WORKERS + call.worker,
                completions=call.completions,
            )

    @contextlib.contextmanager
    def step(self, stage: str, number: int) -> Iterator[Span]:
        """Records a step, and starts or stops the profile that the configuration asks for."""
        if number in self._steps and not self._recording:
            with _ignore_full_disk(self._profiles):
                jax.profiler.start_trace(self._profiles)
                self._recording = True
        try:
            with (
                jax.profiler.StepTraceAnnotation(stage, step_num=number),
                self.span("step", stage=stage, step=number) as span,
            ):
                yield span
        finally:
            if number + 1 not in self._steps:
                self._stop()

    def close(self) -> None:
        """Ends a running profile and closes the file."""
        self._stop()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            with _ignore_full_disk(self._profiles):
                jax.profiler.stop_trace()

    def _write(self, event: dict) -> None:
        """Appends a line, or nothing on a full disk: events and checkpoints report it."""
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
def _ignore_full_disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        _LOG.error("%s: no profile is recorded: %s", directory, error)


def _open(path: Path) -> tuple[int | None, int]:
    """Returns (file opened for appending, its size) without a torn last line; (None, 0) on a full
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
