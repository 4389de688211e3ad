"""Calls rewards in worker processes: one thread per process, which sends one call after another."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rewards.registry import Parameters
from rewards.workers.process import WorkerLost, WorkerProcess
from rewards.workers.worker import LOG_LIMIT

_LOG = logging.getLogger("duet.rewards")
_LOAD_LIMIT_S = 120.0
_MOST_CHILDREN = 256


@dataclass(frozen=True)
class Function:
    """One reward of a run: its short name, address for the worker, weight in the total, options and
    arguments."""

    name: str
    address: str
    weight: float
    options: dict
    parameters: Parameters


@dataclass(frozen=True)
class Failure:
    """The result of a sample without a score. `kind`: as in `scores.RewardFault`, or "closed" if
    the runner was closed."""

    kind: str
    text: str


Result = float | None | Failure
"""A score, None (not applicable), or a Failure."""


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker process.

    worker: number of the worker, unique among all processes that share completions.
    began: start as time.time() returns it.
    seconds: time until the answer, or until the call failed.
    """

    function: str
    completions: int
    worker: int
    began: float
    seconds: float


@dataclass
class ScoringBatch:
    """Completions that are being scored.

    inputs: argument name -> column of one value per completion.
    results: for each completion, one result per function: a score, None (not applicable), or a
    Failure.
    retried: number of calls that were made again, one by one. causes: number of the function -> the
    first failure of such a call with several completions.
    logs: (completion, number of the function) -> what the function printed, or returned with the
    score.
    """

    inputs: dict
    results: list[list[Result]]
    calls_left: int
    calls: list[Call] = field(default_factory=list)
    retried: int = 0
    causes: dict[int, Failure] = field(default_factory=dict)
    logs: dict[tuple[int, int], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)

    def finish_call(self) -> None:
        """Counts down the calls, and sets `done` after the last."""
        with self.lock:
            self.calls_left -= 1
            if self.calls_left == 0:
                self.done.set()


class ScoredCall(NamedTuple):
    """What one call of a worker gave: the results of its samples, the failure of the call if it
    failed, and how many seconds it took."""

    results: list[Result]
    failure: Failure | None
    seconds: float


QueuedCall: TypeAlias = tuple[ScoringBatch, int, list[int]]
"""A call that waits: its batch, the number of its function and its samples."""


class WorkerThread:
    """One thread and its worker process.

    The thread takes calls from the queue and stores results in their batches. It waits for the
    worker, at most until the deadline. The answer, the deadline, the end of the worker or `stop`
    unblocks it. It ends at None in the queue.
    """

    def __init__(
        self,
        number: int,
        calls: queue.SimpleQueue[QueuedCall | None],
        functions: tuple[Function, ...],
        timeout_s: float,
        memory_limit_mb: int | None,
        deadline: str,
    ):
        """Starts the thread. `number` identifies the worker in `Call.worker`. deadline: the key of
        `timeout_s` and its value, for messages."""
        self._number = number
        self._calls = calls
        self._functions = functions
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._deadline = deadline
        self._process: WorkerProcess | None = None
        self._loaded: set[int] = set()
        self._lock = threading.Lock()
        self._busy = False
        self._stopped = False
        self.thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the running call and all queued calls as "closed". Does not wait for them."""
        with self._lock:
            self._stopped = True
            if self._busy and self._process is not None:
                self._process.kill()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            batch, slot, samples = call
            try:
                results = self._score(batch, slot, samples)
            except (
                Exception
            ) as error:  # the run waits for these results, so that any error must reach it
                _LOG.exception("scoring failed outside the reward")
                results = [Failure("died", f"scoring failed outside the reward: {error!r}")] * len(
                    samples
                )
                self._drop()
            for sample, result in zip(samples, results, strict=True):
                batch.results[sample][slot] = result
            batch.finish_call()
        self._drop(grace=True)

    def _score(self, batch: ScoringBatch, slot: int, samples: list[int]) -> list[Result]:
        """Scores samples. The top of `runner` says which calls are tried again, and for how
        long."""
        attempt = self._attempt(batch, slot, samples, self._timeout_s)
        failure = attempt.failure
        if failure is None:
            return attempt.results
        if failure.kind in ("load", "closed") or (len(samples) == 1 and failure.kind != "died"):
            return [failure] * len(samples)
        with batch.lock:
            batch.retried += 1
            if len(samples) > 1:
                batch.causes.setdefault(slot, failure)
        budget = self._timeout_s if failure.kind == "timeout" else None
        results = []
        for position, sample in enumerate(samples):
            limit = self._timeout_s if budget is None else budget / (len(samples) - position)
            attempt = self._attempt(batch, slot, [sample], limit)
            failure = attempt.failure
            results.append(attempt.results[0] if failure is None else failure)
            if budget is not None:
                budget -= min(limit, attempt.seconds)
            elif failure is not None and failure.kind == "timeout":
                budget = self._timeout_s
        return results

    def _attempt(
        self, batch: ScoringBatch, slot: int, samples: list[int], timeout_s: float
    ) -> ScoredCall:
        """Makes one call in the worker."""
        process = self._ready(slot)
        if isinstance(process, Failure):
            return ScoredCall([], process, 0.0)
        arguments = _arguments(self._functions[slot], batch.inputs, samples)
        message = {"call": slot, "count": len(samples), "arguments": arguments}
        at = time.time()
        began = time.monotonic()
        try:
            answer = process.ask(message, timeout_s)
            results, failure = _checked(answer, len(samples))
            logs = _logs(answer, len(samples))
            seconds = time.monotonic() - began
            if (
                answer.get("children", 0) > _MOST_CHILDREN
            ):  # the reward starts processes and does not end them
                self._drop()
        except WorkerLost as lost:
            seconds = time.monotonic() - began
            results = []
            failure = self._lost(lost, lost.kind)
            logs = {}
        with batch.lock:
            batch.logs |= {(samples[index], slot): text for index, text in logs.items()}
            batch.calls.append(
                Call(self._functions[slot].name, len(samples), self._number, at, seconds)
            )
        self._busy = False
        return ScoredCall(results, failure, seconds)

    def _ready(self, slot: int) -> WorkerProcess | Failure:
        """Returns a worker process with the function loaded, or the reason why there is none."""
        with self._lock:
            if self._stopped:
                return Failure("closed", "")
            self._busy = True
            if self._process is None:
                try:
                    self._process = WorkerProcess(self._memory_limit_mb)
                except OSError as error:
                    return Failure("load", f"no worker process can be started: {error}")
            process = self._process
        if slot in self._loaded:
            return process
        function = self._functions[slot]
        message = {"load": slot, "spec": function.address, "options": function.options}
        try:
            answer = process.ask(message, max(_LOAD_LIMIT_S, self._timeout_s))
        except WorkerLost as lost:
            return self._lost(lost, "load")
        if "error" in answer:
            return Failure("load", str(answer.get("text")))
        self._loaded.add(slot)
        return process

    def _lost(self, lost: WorkerLost, kind: str) -> Failure:
        self._drop()
        text = lost.text
        if kind == "timeout":
            first, line_break, output = text.partition("\n")
            text = f"{first} ({self._deadline}){line_break}{output}"
        return Failure("closed" if self._stopped else kind, text)

    def _drop(self, grace: bool = False) -> None:
        with self._lock:
            process = self._process
            self._process = None
        self._loaded = set()
        if process is not None:
            process.close(grace)


def _arguments(function: Function, inputs: dict, samples: list[int]) -> dict:
    """Returns the arguments of one call on these samples, without the options."""
    arguments = {}
    for name, column in inputs.items():
        if function.parameters.accepts(name) and name not in function.options:
            arguments[name] = (
                column if name == "max_new_tokens" else [column[sample] for sample in samples]
            )
    return arguments


def _checked(answer: dict, count: int) -> tuple[list[Result], Failure | None]:
    """Returns (results, failure) of an answer. Validates it, because the worker ran the code of the
    user."""
    if "error" in answer:
        return [], Failure(str(answer["error"]), str(answer.get("text")))
    values = answer.get("values")
    bad = answer.get("bad")
    if (
        not isinstance(values, list)
        or not isinstance(bad, list)
        or len(values) != count
        or not _finite(values)
    ):
        raise WorkerLost(
            "died", "the worker's answer is damaged: the reward wrote to the worker's own pipe"
        )
    results: list[Result] = list(values)
    for index, kind, text in bad:
        results[index] = Failure(kind, text)
    return results, None


def _logs(answer: dict, count: int) -> dict[int, str]:
    """Returns the texts of an answer by index, without what has another form: the worker ran the
    code of the user."""
    logs = answer.get("logs")
    if not isinstance(logs, dict):
        return {}
    known = {str(index): index for index in range(count)}
    return {
        known[key]: text[:LOG_LIMIT]
        for key, text in logs.items()
        if key in known and isinstance(text, str)
    }


def _finite(values: list) -> bool:
    return all(
        value is None or (isinstance(value, float) and math.isfinite(value)) for value in values
    )
