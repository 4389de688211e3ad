"""Scores completions in worker processes, so that no fault of a reward reaches the run.

One call is one function on one group of completions, with a deadline of `timeout_s` seconds (the
start of the worker and the import of the function do not count). The consequences of a fault:

- a score that is NaN, infinite or not a number: this sample has no score;
- a score or a weighted sum beyond float32, the type of the loss: the function with the largest
  score has faulted;
- a call that raises, ends the process or returns the wrong length or type: the completions of the
  group are scored again, one by one, so that only the samples that fail alone have no score. A
  function that compares the completions of a group then sees one of them at a time. A single
  completion is tried again only if the process ended, because the cause may lie outside (out of
  memory, a scheduler that signals every process);
- a call that exceeds its deadline: the worker and its children are killed and replaced, and the
  completions are scored one by one too, all within another `timeout_s`: each gets an equal share of
  the remaining time.

A sample on which any function faulted has no total. None from a function means not applicable and
is not a fault.

Shapes: N completions, F functions.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rewards import registry
from rewards.registry import RewardError, RewardFailed
from rewards.workers.columns import plain, split_groups
from rewards.workers.scores import RewardFault, Scores, call_times, statistics, weighted_sums
from rewards.workers.threads import (
    Call,
    Failure,
    Function,
    QueuedCall,
    Result,
    ScoringBatch,
    WorkerThread,
)

_LOG = logging.getLogger("duet.rewards")
_SHOWN_FAULTS = 3
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a Runner. Raises RewardError for invalid ones.

    functions: (spec, weight, options) each, see `registry`. An option overrides a column of the
    same name. timeout_s: deadline of one call in seconds.
    on_error: "continue" (the sample has no score) or "stop" (RewardFailed).
    timeout_key: where the deadline is set, for messages.
    memory_limit_mb: limit of the address space of a worker in MiB; None: no limit.
    """

    functions: tuple[tuple[str, float, dict], ...]
    workers: int = 2
    timeout_s: float = 10.0
    on_error: str = "continue"
    memory_limit_mb: int | None = None
    timeout_key: str = "rewards.timeout_s"

    def __post_init__(self):
        if not self.functions:
            raise RewardError("no reward: name at least one function")
        if self.workers < 1 or not self.timeout_s > 0:
            raise RewardError(
                f"workers={self.workers}, timeout_s={self.timeout_s}: both must be positive"
            )
        if self.on_error not in ("continue", "stop"):
            raise RewardError(f"on_error is 'continue' or 'stop', not {self.on_error!r}")


@dataclass(frozen=True)
class Share:
    """The part of the calls that this process makes: every count-th, from number `index` on.

    count: number of processes that score the same completions.
    gather: returns the values of all processes in their order; all processes must call it.
    """

    index: int = 0
    count: int = 1
    gather: Callable[[object], list] = lambda value: [value]


class Handle:
    """Scores that are being computed. `result()` waits for them; `done()` tells whether they are
    complete."""

    def __init__(
        self,
        runner: Runner,
        batch: ScoringBatch,
        calls: list[list[int]],
        own: list[list[int]],
        on_calls: Callable[[Sequence[Call]], None] | None = None,
    ):
        """Tracks a batch.

        calls: samples of each call.
        own: the part of the calls that this process makes.
        on_calls: called with the calls of all processes once the scores are complete.
        """
        self._on_calls = on_calls
        self._runner = runner
        self._batch = batch
        self._scores: Scores | None = None
        self._own = {id(call): call for call in own}
        self._groups = calls
        self._call_of = {sample: call for call in calls for sample in call}
        self._missing = {id(call): len(call) for call in calls}

    def add(self, sample: int, completion: object, **columns: object) -> None:
        """Adds the completion of a sample that `Runner.open` announced, and its values in further
        columns.

        The functions are called when the completions of the group are complete.
        """
        inputs = self._batch.inputs
        call = self._call_of[sample]
        inputs["completions"][sample] = plain(completion, "completions")
        for name, value in columns.items():
            if name in inputs:
                inputs[name][sample] = plain(value, name)
        self._missing[id(call)] -= 1
        if self._missing[id(call)] == 0 and id(call) in self._own:
            self._runner._put(self._batch, call)

    def done(self) -> bool:
        """Tells whether the calls of this process have ended."""
        return self._batch.done.is_set()

    def result(self) -> Scores:
        """Waits for the scores and returns them.

        Raises RewardFailed if a function faulted and `on_error` is "stop", RewardError if the
        runner was closed.
        """
        if self._scores is None:
            self._batch.done.wait()
            self._runner._exchange(
                self._batch, [sample for call in self._own.values() for sample in call]
            )
            if self._on_calls is not None:
                self._on_calls(self._batch.calls)
            self._scores = self._runner._collect(self._batch, self._groups)
        return self._scores


class Runner:
    """Worker processes for the functions of `options`. Use it as a context manager, or call
    `close()`.

    The constructor checks every function and its options (RewardError) and starts nothing. Workers
    start with the first call and are kept. Results do not depend on the order in which workers
    finish.

    With a `share` one process scores each completion. Every process passes all completions to
    `start` or `open`, and gets the scores of all.
    """

    def __init__(self, options: RunnerOptions, share: Share = Share()):
        self.options = options
        self._share = share
        self._functions = _resolve(options.functions)
        self.names = tuple(function.name for function in self._functions)
        # An interruption within the `put` of a `queue.Queue` can leave its lock taken for good.
        self._calls: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()
        self._threads: list[WorkerThread] = []
        self._shown: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._told: set[str] = set()
        self._closed = False

    @property
    def sources(self) -> list[str]:
        """Sources of the reward models whose scores the functions need."""
        functions = self.options.functions
        return sorted(
            {options["source"] for name, _, options in functions if name == registry.REWARD_MODEL}
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def score(
        self,
        prompts: list,
        completions: list,
        columns: dict[str, list],
        groups: list[int] | None = None,
    ) -> Scores:
        """Scores N completions: `start`, then `result`."""
        return self.start(prompts, completions, columns, groups).result()

    def start(
        self,
        prompts: list,
        completions: list,
        columns: dict[str, list],
        groups: list[int] | None = None,
        on_calls: Callable[[Sequence[Call]], None] | None = None,
    ) -> Handle:
        """Starts scoring N completions and returns immediately, so that decoding can continue.

        prompts, completions: N strings, or N lists of messages ({"role", "content"}).
        columns: column of the data -> N values that JSON can hold (numpy arrays and scalars are
        converted). Functions
            can also name "completion_lengths" (N ints, tokens), "truncated" (N bools), "raw" (N
            texts with special tokens), "max_new_tokens" (one int) and "reward_model_scores" (N
            mappings from source to score). A function receives the columns that it names, or all if
            it takes **kwargs.
        groups: N ids; the completions of one id are scored in one call. None: each completion is
        its own group. on_calls: called with the calls of all processes once the scores are
        complete.
        Raises RewardError if lengths differ, a required column is missing or a value has another
        type.
        """
        handle = self._begin(prompts, completions, columns, groups, on_calls)
        for call in handle._own.values():
            self._put(handle._batch, call)
        return handle

    def open(
        self,
        prompts: list,
        columns: dict[str, list],
        groups: list[int] | None = None,
        on_calls: Callable[[Sequence[Call]], None] | None = None,
    ) -> Handle:
        """Prepares to score completions that are still being sampled; pass each to `Handle.add`.

        Columns that depend on the completion, for instance its length, hold placeholders of their
        type until then. All else is as in `start`.
        """
        return self._begin(prompts, [None] * len(prompts), columns, groups, on_calls)

    def _begin(
        self,
        prompts: list,
        completions: list,
        columns: dict[str, list],
        groups: list[int] | None,
        on_calls: Callable[[Sequence[Call]], None] | None,
    ) -> Handle:
        if self._closed:
            raise RewardError("this Runner is closed")
        inputs = self._inputs(prompts, completions, columns)
        calls = split_groups(len(prompts), groups)
        own = calls[self._share.index :: self._share.count]
        count = len(own) * len(self._functions)
        batch = ScoringBatch(inputs, [[None] * len(self._functions) for _ in prompts], count)
        if not count:
            batch.done.set()
        options = self.options
        while (threads := len(self._threads)) < min(options.workers, count):
            number = self._share.index * options.workers + threads
            self._threads.append(
                WorkerThread(
                    number,
                    self._calls,
                    self._functions,
                    options.timeout_s,
                    options.memory_limit_mb,
                    f"{options.timeout_key}: {options.timeout_s:g}",
                )
            )
        return Handle(self, batch, calls, own, on_calls)

    def _put(self, batch: ScoringBatch, samples: list[int]) -> None:
        for slot in range(len(self._functions)):
            self._calls.put((batch, slot, samples))

    def close(self) -> None:
        """Ends all workers, also during a call. Can be called twice."""
        self._closed = True
        for worker in self._threads:
            worker.stop()
        for _ in self._threads:
            self._calls.put(None)
        for worker in self._threads:
            worker.thread.join()
        self._threads = []

    def _inputs(self, prompts: list, completions: list, columns: dict) -> dict:
        """Checks prompts, completions and columns. Returns the columns that a function can receive,
        as plain values."""
        count = len(prompts)
        for name, column in {"completions": completions, **columns}.items():
            if name != "max_new_tokens" and (
                not hasattr(column, "__len__") or len(column) != count
            ):
                raise RewardError(
                    f"{name!r} must be a list with one value for each of the {count} prompts"
                )
        inputs = {
            "prompts": plain(prompts, "prompts"),
            "completions": plain(completions, "completions"),
        }
        for function in self._functions:
            registry.require_columns(function.name, function.parameters, function.options, columns)
        for name, column in columns.items():
            named = any(name in function.parameters.names for function in self._functions)
            if not named and not any(function.parameters.open for function in self._functions):
                continue
            try:
                inputs[name] = plain(column, name)
            except RewardError as error:
                if named:
                    raise
                if name not in self._warned:
                    self._warned.add(name)
                    _LOG.warning("rewards do not receive column %r: %s", name, error)
        return inputs

    def _exchange(self, batch: ScoringBatch, own: list[int]) -> None:
        """Adds the results of the other processes to a batch. `own`: the samples that this process
        has scored."""
        if self._share.count == 1:
            return
        results = {sample: batch.results[sample] for sample in own}
        parts = self._share.gather((results, batch.calls, batch.retried, batch.logs, batch.causes))
        batch.calls = [call for _, calls, *_ in parts for call in calls]
        batch.retried = sum(retried for _, _, retried, *_ in parts)
        batch.logs = {key: text for *_, logs, _ in parts for key, text in logs.items()}
        batch.causes = {
            slot: cause for *_, causes in reversed(parts) for slot, cause in causes.items()
        }
        for results, *_ in parts:
            for sample, row in results.items():
                batch.results[sample] = row

    def _collect(self, batch: ScoringBatch, groups: list[list[int]]) -> Scores:
        """Returns the scores of a complete batch. groups: its samples, by group. Raises as
        `Handle.result`."""
        for row in batch.results:
            self._refuse_overflow(row)
        prompts = batch.inputs["prompts"]
        completions = batch.inputs["completions"]
        faults = [
            RewardFault(
                name, sample, result.kind, result.text, prompts[sample], completions[sample]
            )
            for slot, name in enumerate(self.names)
            for sample, result in enumerate(row[slot] for row in batch.results)
            if isinstance(result, Failure)
        ]
        if any(fault.kind == "closed" for fault in faults):
            raise RewardError("the Runner was closed before these completions were scored")
        rewards = np.array(
            [
                [each if isinstance(each, float) else math.nan for each in row]
                for row in batch.results
            ],
            np.float64,
        ).reshape(len(batch.results), len(self.names))
        weights = [function.weight for function in self._functions]
        faulted = [fault.sample for fault in faults]
        total = weighted_sums(rewards, weights, faulted, groups)
        self._show(faults)
        self._show_causes(batch.causes)
        if faults and self.options.on_error == "stop":
            fault = faults[0]
            raise RewardFailed(
                f"reward {fault.function} failed ({fault.kind}) "
                f"on\n{fault.sample_text()}\n{fault.traceback}"
            )
        logs: dict[int, dict[str, str]] = defaultdict(dict)
        for (sample, slot), text in sorted(batch.logs.items()):
            logs[sample][self.names[slot]] = text
        causes = {
            self.names[slot]: cause.text.strip() for slot, cause in sorted(batch.causes.items())
        }
        return Scores(
            rewards,
            total,
            self.names,
            faults,
            self._metrics(batch, rewards, faults),
            dict(logs),
            causes,
            seconds=[call.seconds for call in batch.calls],
        )

    def _refuse_overflow(self, row: list[Result]) -> None:
        """Replaces the largest scores of a sample by Failures until all, and their weighted sum,
        fit in float32."""
        scores = {slot: result for slot, result in enumerate(row) if isinstance(result, float)}
        weighted = {slot: score * self._functions[slot].weight for slot, score in scores.items()}
        size = {slot: max(abs(scores[slot]), abs(weighted[slot])) for slot in scores}
        while size and max([*size.values(), abs(sum(weighted[slot] for slot in size))]) > _LARGEST:
            largest = max(size, key=lambda slot: size[slot])
            text = (
                f"{scores[largest]:.3g}, times its weight {weighted[largest]:.3g}: "
                "this, or the sum of all, does not fit in float32"
            )
            row[largest] = Failure("not_finite", text)
            del size[largest]

    def _show(self, faults: list[RewardFault]) -> None:
        for fault in faults:
            self._shown[fault.function] += 1
            number = self._shown[fault.function]
            if number <= _SHOWN_FAULTS and self._share.index == 0:
                note = (
                    "; further ones are only counted, in reward/faults"
                    if number == _SHOWN_FAULTS
                    else ""
                )
                _LOG.warning(
                    "reward %s failed (%s), the sample has no score%s\n%s\n%s",
                    *(fault.function, fault.kind, note, fault.sample_text(), fault.traceback),
                )

    def _show_causes(self, causes: dict[int, Failure]) -> None:
        """Says once for each function that it fails on a group, and is called with one completion
        at a time."""
        for slot, cause in sorted(causes.items()):
            if self.names[slot] not in self._told and self._share.index == 0:
                self._told.add(self.names[slot])
                _LOG.warning(
                    "reward %s failed on a group of completions (%s): %s\nIt was called again "
                    "with each completion alone. This is slower, and a function that compares "
                    "completions sees one of them; later such calls are only counted, in "
                    "reward/retried",
                    *(self.names[slot], cause.kind, cause.text.strip()),
                )

    def _metrics(
        self, batch: ScoringBatch, rewards: np.ndarray, faults: list[RewardFault]
    ) -> dict[str, float]:
        metrics = statistics(rewards, self.names)
        metrics["reward/faults"] = float(len(faults))
        metrics["reward/timeouts"] = float(sum(fault.kind == "timeout" for fault in faults))
        metrics["reward/not_applicable"] = float(
            sum(each is None for row in batch.results for each in row)
        )
        metrics["reward/retried"] = float(batch.retried)
        return metrics | call_times([call.seconds for call in batch.calls])


def _resolve(functions: tuple[tuple[str, float, dict], ...]) -> tuple[Function, ...]:
    """Checks and locates the functions. A name that occurs again gets a number. Raises
    RewardError."""
    resolved: list[Function] = []
    seen: Counter[str] = Counter()
    for spec, weight, options in functions:
        registry.check(spec, options)
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not math.isfinite(weight)
        ):
            raise RewardError(f"reward {spec}: weight {weight!r} is not a finite number")
        located = registry.locate(spec)
        seen[located.name] += 1
        name = located.name if seen[located.name] == 1 else f"{located.name}-{seen[located.name]}"
        values = plain(dict(options), f"options of {spec}")
        parameters = registry.parameters(located.function, spec)
        resolved.append(Function(name, located.address, float(weight), values, parameters))
    return tuple(resolved)
