"""Calls of rewards, and the threads that put them to worker processes one after another."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, field

from rewards.registry import Parameters
from rewards.workers.process import WorkerLost, WorkerProcess

_LOG = logging.getLogger("duet.rewards")
_LOAD_LIMIT_S = 120.0
_MOST_CHILDREN = 256


@dataclass(frozen=True)
class Function:
    """One reward of a run: short name, address for the worker, weight in the total, options, arguments it takes."""

    name: str
    address: str
    weight: float
    options: dict
    takes: Parameters


@dataclass(frozen=True)
class Failure:
    """Stands in a cell in place of a score; `kind` as in `runner.Fault`, or "closed": the runner was closed."""

    kind: str
    text: str


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker process, counted through all processes that share completions. `began`: as time.time()
    gives it; `seconds`: until the answer, or until there was none."""

    function: str
    completions: int
    worker: int
    began: float
    seconds: float


@dataclass
class Batch:
    """Completions on their way: what the functions are given, and what came back so far."""

    given: dict
    cells: list[list[float | None | Failure]]
    calls_left: int
    calls: list[Call] = field(default_factory=list)
    retried: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)

    def finish_call(self) -> None:
        with self.lock:
            self.calls_left -= 1
            if self.calls_left == 0:
                self.done.set()


class Lane:
    """One thread and the worker process that it talks to.

    Consumes calls from the queue; produces cells of their batches; waits for the worker, never longer than a deadline;
    is unblocked by the answer, the deadline, the end of the worker or `stop`. Ends at None in the queue.
    """

    def __init__(
        self,
        number: int,
        calls: queue.Queue,
        functions: tuple[Function, ...],
        timeout_s: float,
        memory_limit_mb: int | None,
    ):
        """`number`: by which its calls are told from those of other workers."""
        self._number = number
        self._calls = calls
        self._functions = functions
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._process: WorkerProcess | None = None
        self._loaded: set[int] = set()
        self._lock = threading.Lock()
        self._busy = False
        self._stopped = False
        self.thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Makes a call that is running and all that wait end as "closed", without waiting for it."""
        with self._lock:
            self._stopped = True
            if self._busy and self._process is not None:
                self._process.kill()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            batch, slot, samples = call
            try:
                cells = self._score(batch, slot, samples)
            except Exception as error:  # whatever it is, the run waits for these cells and must hear of it
                _LOG.exception("scoring failed outside the reward")
                cells = [Failure("died", f"scoring failed outside the reward: {error!r}")] * len(samples)
                self._drop()
            for sample, cell in zip(samples, cells, strict=True):
                batch.cells[sample][slot] = cell
            batch.finish_call()
        self._drop(grace=True)

    def _score(self, batch: Batch, slot: int, samples: list[int]) -> list[float | None | Failure]:
        """Cells of the samples. What is tried again, and how long that may take, is said at the top of `runner`."""
        cells, failure, _ = self._attempt(batch, slot, samples, self._timeout_s)
        if failure is None:
            return cells
        if failure.kind in ("load", "closed") or (len(samples) == 1 and failure.kind != "died"):
            return [failure] * len(samples)
        with batch.lock:
            batch.retried += 1
        budget = self._timeout_s if failure.kind == "timeout" else None
        results = []
        for position, sample in enumerate(samples):
            limit = self._timeout_s if budget is None else budget / (len(samples) - position)
            cells, failure, seconds = self._attempt(batch, slot, [sample], limit)
            results.append(cells[0] if failure is None else failure)
            if budget is not None:
                budget -= min(limit, seconds)
            elif failure is not None and failure.kind == "timeout":
                budget = self._timeout_s
        return results

    def _attempt(self, batch: Batch, slot: int, samples: list[int], timeout_s: float):
        """One call in the worker: (cells of its samples, or why there are none, seconds)."""
        failure = self._ready(slot)
        if failure is not None:
            return [], failure, 0.0
        arguments = _arguments(self._functions[slot], batch.given, samples)
        message = {"call": slot, "count": len(samples), "arguments": arguments}
        at, began = time.time(), time.monotonic()
        try:
            answer = self._process.ask(message, timeout_s)
            cells, failure = _checked(answer, len(samples))
            seconds = time.monotonic() - began
            if answer.get("children", 0) > _MOST_CHILDREN:  # a reward that starts processes and never ends them
                self._drop()
        except WorkerLost as lost:
            seconds = time.monotonic() - began
            cells, failure = [], self._lost(lost, lost.kind)
        with batch.lock:
            batch.calls.append(Call(self._functions[slot].name, len(samples), self._number, at, seconds))
        self._busy = False
        return cells, failure, seconds

    def _ready(self, slot: int) -> Failure | None:
        """Has a worker with the function loaded, or says why not."""
        with self._lock:
            if self._stopped:
                return Failure("closed", "")
            self._busy = True
            if self._process is None:
                try:
                    self._process = WorkerProcess(self._memory_limit_mb)
                except OSError as error:
                    return Failure("load", f"no worker process can be started: {error}")
        if slot in self._loaded:
            return None
        function = self._functions[slot]
        message = {"load": slot, "spec": function.address, "options": function.options}
        try:
            answer = self._process.ask(message, max(_LOAD_LIMIT_S, self._timeout_s))
        except WorkerLost as lost:
            return self._lost(lost, "load")
        if "error" in answer:
            return Failure("load", str(answer.get("text")))
        self._loaded.add(slot)
        return None

    def _lost(self, lost: WorkerLost, kind: str) -> Failure:
        self._drop()
        return Failure("closed" if self._stopped else kind, lost.text)

    def _drop(self, grace: bool = False) -> None:
        with self._lock:
            process, self._process = self._process, None
        self._loaded = set()
        if process is not None:
            process.close(grace)


def _arguments(function: Function, given: dict, samples: list[int]) -> dict:
    """What one call is given: the arguments that the function takes, options apart, of these samples."""
    arguments = {}
    for name, column in given.items():
        if function.takes.takes(name) and name not in function.options:
            arguments[name] = column if name == "max_new_tokens" else [column[sample] for sample in samples]
    return arguments


def _checked(answer: dict, count: int) -> tuple[list, Failure | None]:
    """Cells of an answer. The worker ran code of others, so its answer is looked at again on this side."""
    if "error" in answer:
        return [], Failure(str(answer["error"]), str(answer.get("text")))
    values, bad = answer.get("values"), answer.get("bad")
    finite = isinstance(values, list) and all(v is None or (isinstance(v, float) and math.isfinite(v)) for v in values)
    if not finite or len(values) != count or not isinstance(bad, list):
        raise WorkerLost("died", "the worker's answer is damaged: the reward wrote to the worker's own pipe")
    for index, kind, text in bad:
        values[index] = Failure(kind, text)
    return values, None
