"""Scores completions in worker processes, so that no fault of a reward reaches the run.

One call is one function on one group of completions, under a deadline of `timeout_s` seconds (starting the worker and
importing the function do not count). What a fault costs:

- a score that is NaN, infinite or no number: this sample has no score;
- a score or a weighted sum beyond float32, in which the run learns: the function with the largest score has faulted;
- a call that raises, ends the process or returns the wrong length or type: the completions of the group are scored once
  more, one by one, so that only those that fail alone have no score. A function that compares the completions of a
  group sees one of them then. A single completion is tried again only if the process ended, which may have come from
  outside (out of memory, a scheduler that signals every process);
- a call that exceeds its deadline: the worker is killed with its children and replaced, and the completions are scored
  one by one too, all of them within another `timeout_s`: each gets an equal share of what is left of it.

A sample on which any function faulted has no total. None from a function means not applicable and is no fault.

Shapes: N completions, F functions.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rewards import registry
from rewards.registry import RewardError, RewardFailed
from rewards.workers.pool import Batch, Call, Failure, Function, Lane

_LOG = logging.getLogger("duet.rewards")
_SHOWN_FAULTS = 3
_SHOWN_CHARACTERS = 500
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RunnerOptions:
    """`functions`: (spec, weight, options) each, see `registry`; an option wins over a column of the same name.
    `timeout_s`: seconds of one call. `on_error`: "continue" (the sample has no score) or "stop" (RewardFailed).
    `memory_limit_mb`: address space of a worker in MiB; None: no limit."""

    functions: tuple[tuple[str, float, dict], ...]
    workers: int = 2
    timeout_s: float = 10.0
    on_error: str = "continue"
    memory_limit_mb: int | None = None

    def __post_init__(self):
        if not self.functions:
            raise RewardError("no reward: name at least one function")
        if self.workers < 1 or not self.timeout_s > 0:
            raise RewardError(f"workers={self.workers}, timeout_s={self.timeout_s}: both must be positive")
        if self.on_error not in ("continue", "stop"):
            raise RewardError(f"on_error is 'continue' or 'stop', not {self.on_error!r}")


@dataclass(frozen=True)
class Share:
    """Which calls a Runner makes where `count` processes score the same completions: every count-th, from number `index` on.
    `gather(value)` gives what each process has given, by its number; all have to call it."""

    index: int = 0
    count: int = 1
    gather: Callable[[object], list] = lambda value: [value]


@dataclass(frozen=True)
class Fault:
    """One sample that one function gave no score for. `kind`: raised, timeout, died (of the process), wrong_type,
    wrong_length, not_finite, or load (the function could not be imported in the worker)."""

    function: str
    sample: int
    kind: str
    traceback: str
    prompt: object
    completion: object


@dataclass(frozen=True)
class Scores:
    """`rewards` float64[N, F], NaN: no score; `total` float64[N]: weighted sum of the scores that are there, NaN if
    there is none or any function faulted; `names` of the F functions; `faults` by function, then sample; `metrics`."""

    rewards: np.ndarray
    total: np.ndarray
    names: tuple[str, ...]
    faults: list[Fault]
    metrics: dict[str, float]


class Handle:
    """Scores that are being computed. `result()` waits for them; `done()` tells whether it would wait."""

    def __init__(
        self,
        runner: Runner,
        batch: Batch,
        calls: list[list[int]],
        own: list[list[int]],
        on_calls: Callable[[Sequence[Call]], None] | None = None,
    ):
        """`own`: the calls that this process makes. `on_calls`: is told the calls of all processes once the scores are there."""
        self._on_calls = on_calls
        self._runner = runner
        self._batch = batch
        self._scores = None
        self._own = {id(call): call for call in own}
        self._call_of = {sample: call for call in calls for sample in call}
        self._missing = {id(call): len(call) for call in calls}

    def add(self, sample: int, completion: object, **columns: object) -> None:
        """The completion of a batch that `Runner.open` began, and its values in columns that were not known then. The functions
        are called as soon as all completions of its group are there."""
        given, call = self._batch.given, self._call_of[sample]
        given["completions"][sample] = _plain(completion, "completions")
        for name, value in columns.items():
            if name in given:
                given[name][sample] = _plain(value, name)
        self._missing[id(call)] -= 1
        if self._missing[id(call)] == 0 and id(call) in self._own:
            self._runner._put(self._batch, call)

    def done(self) -> bool:
        return self._batch.done.is_set()

    def result(self) -> Scores:
        """Raises RewardFailed if a function faulted and `on_error` is "stop"; RewardError if the runner was closed."""
        if self._scores is None:
            self._batch.done.wait()
            self._runner._exchange(self._batch, [sample for call in self._own.values() for sample in call])
            if self._on_calls is not None:
                self._on_calls(self._batch.calls)
            self._scores = self._runner._collect(self._batch)
        return self._scores


class Runner:
    """Worker processes for the functions of `options`. Use as a context manager, or call `close()`.

    Construction checks every function and its options (RewardError) and starts nothing; workers start with the first
    call and are kept. Results do not depend on which worker finished first.

    With a `share` each completion is scored by one process only; `start` and `open` are given all completions on every process, and
    results are those of all, on every process.
    """

    def __init__(self, options: RunnerOptions, share: Share = Share()):
        self.options = options
        self._share = share
        self._functions = _resolve(options.functions)
        self.names = tuple(function.name for function in self._functions)
        self._calls: queue.Queue = queue.Queue()
        self._lanes: list[Lane] = []
        self._shown: Counter = Counter()
        self._warned: set[str] = set()
        self._closed = False

    @property
    def sources(self) -> list[str]:
        """The reward models that `reward_model_scorers` must hold before completions are scored."""
        return sorted({options["source"] for name, _, options in self.options.functions if name == registry.JUDGED})

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def score(
        self, prompts: list, completions: list, columns: dict[str, list], groups: list[int] | None = None
    ) -> Scores:
        """Scores N completions: `start` and its `result()` at once."""
        return self.start(prompts, completions, columns, groups).result()

    def start(
        self,
        prompts: list,
        completions: list,
        columns: dict[str, list],
        groups: list[int] | None = None,
        on_calls: Callable[[Sequence[Call]], None] | None = None,
    ) -> Handle:
        """Starts scoring N completions and returns at once, so that decoding may go on meanwhile.

        prompts, completions: N strings, or N lists of messages ({"role", "content"}).
        columns: column of the data -> N values that JSON can hold (numpy arrays and scalars are converted). Besides,
            where functions name them: "completion_lengths" (N ints, tokens), "truncated" (N bools), "max_new_tokens"
            (one int) and "reward_model_scores" (N mappings from source to score). A function receives the columns that
            it names, or all if it takes **kwargs.
        groups: N ids; completions of one id are scored in one call. None: each by itself.
        on_calls: is told the calls that were made, by all processes, once the scores are there.
        Raises RewardError if lengths differ, a column that a function needs is missing or a value has another type.
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
        """Begins to score completions that are still being written: each is given to `Handle.add`. Columns that only the completion
        tells (their lengths, for one) hold anything of their type until then. The rest is as in `start`."""
        return self._begin(prompts, [None] * len(prompts), columns, groups, on_calls)

    def _begin(self, prompts: list, completions: list, columns: dict[str, list], groups, on_calls) -> Handle:
        if self._closed:
            raise RewardError("this Runner is closed")
        given = self._given(prompts, completions, columns)
        calls = _split(len(prompts), groups)
        own = calls[self._share.index :: self._share.count]
        count = len(own) * len(self._functions)
        batch = Batch(given, [[None] * len(self._functions) for _ in prompts], count)
        if not count:
            batch.done.set()
        options = self.options
        while (lanes := len(self._lanes)) < min(options.workers, count):
            number = self._share.index * options.workers + lanes
            self._lanes.append(Lane(number, self._calls, self._functions, options.timeout_s, options.memory_limit_mb))
        return Handle(self, batch, calls, own, on_calls)

    def _put(self, batch: Batch, samples: list[int]) -> None:
        for slot in range(len(self._functions)):
            self._calls.put((batch, slot, samples))

    def close(self) -> None:
        """Ends all workers, those in the middle of a call too. Can be called twice."""
        self._closed = True
        for lane in self._lanes:
            lane.stop()
        for _ in self._lanes:
            self._calls.put(None)
        for lane in self._lanes:
            lane.thread.join()
        self._lanes = []

    def _given(self, prompts: list, completions: list, columns: dict) -> dict:
        count = len(prompts)
        for name, column in {"completions": completions, **columns}.items():
            if name != "max_new_tokens" and (not hasattr(column, "__len__") or len(column) != count):
                raise RewardError(f"{name!r} must be a list with one value for each of the {count} prompts")
        given = {"prompts": _plain(prompts, "prompts"), "completions": _plain(completions, "completions")}
        for function in self._functions:
            registry.require_columns(function.name, function.takes, function.options, columns)
        for name, column in columns.items():
            named = any(name in function.takes.names for function in self._functions)
            if not named and not any(function.takes.open for function in self._functions):
                continue
            try:
                given[name] = _plain(column, name)
            except RewardError as error:
                if named:
                    raise
                if name not in self._warned:
                    self._warned.add(name)
                    _LOG.warning("rewards do not receive column %r: %s", name, error)
        return given

    def _exchange(self, batch: Batch, own: list[int]) -> None:
        """Completes a batch of which this process has scored the samples `own` by what the others have scored."""
        if self._share.count == 1:
            return
        batch_of = self._share.gather(({sample: batch.cells[sample] for sample in own}, batch.calls, batch.retried))
        batch.calls = [call for _, calls, _ in batch_of for call in calls]
        batch.retried = sum(retried for _, _, retried in batch_of)
        for cells, _, _ in batch_of:
            for sample, row in cells.items():
                batch.cells[sample] = row

    def _collect(self, batch: Batch) -> Scores:
        for row in batch.cells:
            self._refuse_overflow(row)
        faults = [
            Fault(
                name, sample, cell.kind, cell.text, batch.given["prompts"][sample], batch.given["completions"][sample]
            )
            for slot, name in enumerate(self.names)
            for sample, cell in enumerate(row[slot] for row in batch.cells)
            if isinstance(cell, Failure)
        ]
        if any(fault.kind == "closed" for fault in faults):
            raise RewardError("the Runner was closed before these completions were scored")
        rewards = np.array(
            [[cell if isinstance(cell, float) else math.nan for cell in row] for row in batch.cells], np.float64
        ).reshape(len(batch.cells), len(self.names))
        missing = np.isnan(rewards)
        weights = np.array([function.weight for function in self._functions])
        total = np.where(missing, 0.0, rewards * weights).sum(axis=1)
        total[missing.all(axis=1)] = math.nan
        total[[fault.sample for fault in faults]] = math.nan
        self._show(faults)
        if faults and self.options.on_error == "stop":
            fault = faults[0]
            raise RewardFailed(
                f"reward {fault.function} failed ({fault.kind}) on\n{_sample_text(fault)}\n{fault.traceback}"
            )
        return Scores(rewards, total, self.names, faults, self._metrics(batch, rewards, faults))

    def _refuse_overflow(self, row: list[float | Failure | None]) -> None:
        """Puts Failures in the place of the largest scores of a sample until the others, weighted and not, fit in float32, and so
        does their sum."""
        weighted = {
            slot: cell * self._functions[slot].weight for slot, cell in enumerate(row) if isinstance(cell, float)
        }
        size = {slot: max(abs(row[slot]), abs(share)) for slot, share in weighted.items()}
        while size and max(*size.values(), abs(sum(weighted[slot] for slot in size))) > _LARGEST:
            largest = max(size, key=size.get)
            text = f"{row[largest]:.3g}, times its weight {weighted[largest]:.3g}: this, or the sum of all, does not fit in float32"
            row[largest] = Failure("not_finite", text)
            del size[largest]

    def _show(self, faults: list[Fault]) -> None:
        for fault in faults:
            self._shown[fault.function] += 1
            number = self._shown[fault.function]
            if number <= _SHOWN_FAULTS and self._share.index == 0:
                note = "; further ones are only counted, in reward/faults" if number == _SHOWN_FAULTS else ""
                _LOG.warning(
                    "reward %s failed (%s), the sample has no score%s\n%s\n%s",
                    *(fault.function, fault.kind, note, _sample_text(fault), fault.traceback),
                )

    def _metrics(self, batch: Batch, rewards: np.ndarray, faults: list[Fault]) -> dict[str, float]:
        metrics = {}
        for slot, name in enumerate(self.names):
            scores = rewards[~np.isnan(rewards[:, slot]), slot]
            if scores.size:
                metrics[f"rewards/{name}/mean"] = float(scores.mean())
                metrics[f"rewards/{name}/std"] = float(scores.std())
        metrics["reward/faults"] = float(len(faults))
        metrics["reward/timeouts"] = float(sum(fault.kind == "timeout" for fault in faults))
        metrics["reward/not_applicable"] = float(sum(cell is None for row in batch.cells for cell in row))
        metrics["reward/retried"] = float(batch.retried)
        if seconds := [call.seconds for call in batch.calls]:
            metrics["time/reward_calls"] = float(sum(seconds))
            for percent in (50, 99):
                metrics[f"time/reward_p{percent}_s"] = float(np.percentile(seconds, percent))
        return metrics


def _resolve(functions: tuple[tuple[str, float, dict], ...]) -> tuple[Function, ...]:
    resolved, seen = [], Counter()
    for spec, weight, options in functions:
        registry.check(spec, options)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise RewardError(f"reward {spec}: weight {weight!r} is not a finite number")
        found = registry.locate(spec)
        seen[found.name] += 1
        name = found.name if seen[found.name] == 1 else f"{found.name}-{seen[found.name]}"
        plain = _plain(dict(options), f"options of {spec}")
        resolved.append(Function(name, found.address, float(weight), plain, registry.parameters(found.function, spec)))
    return tuple(resolved)


def _split(count: int, groups: list[int] | None) -> list[list[int]]:
    """Samples of each call, in the order in which the groups first occur."""
    if groups is None:
        return [[sample] for sample in range(count)]
    if len(groups) != count:
        raise RewardError(f"there are {count} prompts, but {len(groups)} groups")
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(int(group), []).append(sample)
    return list(members.values())


def _plain(value: object, where: str) -> object:
    """The value with numpy arrays, numpy scalars and tuples turned into what JSON has. RewardError for other types."""
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufUO":
        return _plain(value.tolist(), where)
    raise RewardError(
        f"{where} is a {type(value).__name__}; rewards receive text, numbers, booleans, None, lists and dicts of them"
    )


def _sample_text(fault: Fault) -> str:
    return f"prompt: {_shortened(fault.prompt)}\ncompletion: {_shortened(fault.completion)}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
