"""When a run does what: `timeline.json` in its folder, and recordings of jax's profiler.

The file is a list of complete events in the Trace Event Format, for ui.perfetto.dev and chrome://tracing, which want no bracket at
its end: a run that is continued goes on writing it.
"""

from __future__ import annotations

import contextlib
import json
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

FILE, PROFILES = "timeline.json", "profile"
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
        self._file = _opened(directory / FILE) if processes.first() else None
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
            self._file.close()

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()

    def _write(self, event: dict) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk is told of where it matters: by events and checkpoints
                self._file.write(json.dumps(event) + ",\n")


def _opened(path: Path):
    """The file, to write whole lines at its end; what a killed process left of a line is cut off."""
    file = path.open("a+", buffering=1)
    file.seek(0)
    whole = file.read().rpartition("\n")[0]
    file.truncate(len(whole.encode()) + 1 if whole else 0)
    file.seek(0, os.SEEK_END)
    if not whole:
        file.write("[\n")
    return file
