"""Sends the steps of a run to a tracker in a thread of its own, each step once.

A tracker that is slow, or waits for a server, does not delay the run. events.jsonl says which steps
there are. When a run starts or continues, the tracker gets those up to the checkpoint that it
missed, because of a kill or because its server was away. A step that it has is not sent again.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.records.json_lines import complete_lines
from rl.records.trackers.mirror import Metrics, StageSteps, numbers

WAITING = 10_000
"""Steps that may wait for the tracker."""
SECONDS = 60.0
"""Seconds that the end of a run waits for a tracker that has steps to take."""


@dataclass(frozen=True)
class Point:
    """The metrics of a step.

    at: number of the step, counted over all stages. time: Unix seconds.
    """

    at: int
    stage: str
    time: float
    metrics: dict[str, float]


class Tracker(Protocol):
    """The client of a tracker. One thread calls all methods; any may raise and take long."""

    def open(self) -> int:
        """Connects to the run at the tracker, or creates it. Returns the number of the last step
        that the tracker has, -1 if it has none."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Sends steps, in their order."""
        ...

    def close(self, finished: bool) -> None:
        """Ends the connection. finished: whether the last step of the run is done."""
        ...


@dataclass(frozen=True)
class _Lacking:
    """Asks for the steps of events.jsonl up to a number that the tracker lacks."""

    until: int


@dataclass(frozen=True)
class _End:
    finished: bool


class Sender:
    """A mirror whose calls return at once. A call after the tracker has failed raises its error."""

    def __init__(self, tracker: Tracker, stages: Mapping[str, StageSteps], events: Path):
        self._tracker = tracker
        self._stages = stages
        self._events = events
        self._finished = False
        self._error: Exception | None = None
        # An interruption within the `put` of a `queue.Queue` can leave its lock taken for good.
        self._queue: queue.SimpleQueue[Point | _Lacking | _End] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        self._finished = False

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        self._put(Point(self._at(stage, step), stage, time.time(), numbers(metrics)))
        last = list(self._stages)[-1]
        self._finished = stage == last and step == self._stages[last].steps

    def note(self, text: str) -> None:
        pass

    def truncate_after(self, stage: str, step: int) -> None:
        """Has the tracker get the steps up to this one that it lacks."""
        at = self._at(stage, step)
        self._finished = at == max(each.before + each.steps for each in self._stages.values())
        self._put(_Lacking(at))

    def close(self) -> None:
        """Waits until the tracker has all steps. Raises its error, or TimeoutError."""
        self._put(_End(self._finished))
        self._thread.join(SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {SECONDS:.0f} s of the end of the run")

    def _at(self, stage: str, step: int) -> int:
        return self._stages[stage].before + step

    def _put(self, item: Point | _Lacking | _End) -> None:
        if self._error is not None:
            raise self._error
        if self._queue.qsize() >= WAITING:
            raise TimeoutError(f"no answer for {WAITING} steps")
        self._queue.put(item)

    def _work(self) -> None:
        try:
            last = self._tracker.open()
            while True:
                items = self._waiting()
                points = []
                for item in items:
                    if isinstance(item, _Lacking):
                        points += self._recorded(last, item.until)
                    elif isinstance(item, Point):
                        points.append(item)
                # A step is sent where it is later than all before: the tracker has the others.
                new = []
                for point in points:
                    if point.at > last:
                        new.append(point)
                        last = point.at
                if new:
                    self._tracker.log(new)
                if isinstance(items[-1], _End):
                    self._tracker.close(items[-1].finished)
                    return
        except Exception as error:  # any error of a third party's client, its disk or its network
            self._error = error
        except SystemExit as error:
            self._error = RuntimeError(f"its client ended the thread: {error!r}")

    def _waiting(self) -> list[Point | _Lacking | _End]:
        """Waits for an item, and returns it with those that wait behind it, the end last."""
        items = [self._queue.get()]
        while not isinstance(items[-1], _End):
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items

    def _recorded(self, after: int, until: int) -> list[Point]:
        """Reads the steps of events.jsonl with numbers in (after, until]."""
        if until <= after or not self._events.exists():
            return []
        points = []
        for row in map(json.loads, complete_lines(self._events)):
            at = self._at(row["stage"], row["step"])
            if after < at <= until:
                points.append(Point(at, row["stage"], row["time"], numbers(row["metrics"])))
        return points
