"""A curriculum that leaves out rows that are always or never solved.

The share of solved completions of a row, its pass rate, is a column of the data, or follows from
the samples of an earlier run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewards.suggest import nearest_path
from rewards.workers.rounding import at_least
from rl.config.schema import with_home
from rl.data.encoded import Example
from rl.errors import DataError
from rl.records import samples
from rl.records.messages import without_contents
from rl.records.run_files import SAMPLES, read_config, sample_files
from rl.stages.curriculum.interface import Bar, Candidates, Curriculum, Histogram

_BINS = 10


@dataclass(frozen=True)
class PassRateOptions:
    """Options of `pass_rate`.

    column: the column of the data with the pass rate, from 0 to 1. rollouts: folder of a run whose
    samples give it, by prompt. above, below: rows between these rates stay. correct_at: a sample of
    `rollouts` is solved from this reward on; None: 1. missing: what happens to rows without a pass
    rate. Raises ValueError, with the option in backticks.
    """

    column: str | None = None
    rollouts: str | None = None
    above: float = 0.0
    below: float = 1.0
    correct_at: float | None = None
    missing: Literal["keep", "leave_out"] = "keep"

    def __post_init__(self):
        for name in ("column", "rollouts"):
            if not isinstance(value := getattr(self, name), (str, type(None))):
                raise ValueError(f"`{name}` is a text, got {value!r}")
        if (self.column is None) == (self.rollouts is None):
            raise ValueError(
                "give exactly one of `column`, a column of the data with the pass rate, and "
                "`rollouts`, the folder of a run"
            )
        if self.column is not None and self.correct_at is not None:
            raise ValueError(
                "`correct_at` is for rewards of `rollouts`, and a column has pass rates; leave it "
                "out"
            )
        for name in ("above", "below", "correct_at"):
            value = getattr(self, name)
            if name == "correct_at" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"`{name}` is a number, got {value!r}")
        if not self.above < self.below:
            raise ValueError(
                f"`above` must be less than below, got {self.above:g} and {self.below:g}"
            )
        if self.missing not in ("keep", "leave_out"):
            raise ValueError(f"`missing` must be keep or leave_out, got {self.missing!r}")

    def check_files(self) -> None:
        """Raises ValueError, with the option in backticks, if `rollouts` has no samples."""
        if self.rollouts is not None and not list(sample_files(self.folder)):
            raise ValueError(
                f"`rollouts`: {self.rollouts} has no {SAMPLES}; name the folder of a run"
                f"{nearest_path(self.rollouts)}"
            )

    @property
    def folder(self) -> Path:
        """Returns the folder of `rollouts`."""
        return Path(with_home(self.rollouts))

    def keeps(self, rate: float | None) -> bool:
        """Whether a row with this pass rate stays; None: it has none."""
        if rate is None:
            return self.missing == "keep"
        return self.above < rate < self.below


class PassRate(Curriculum):
    """Draws the rows between two pass rates, in the order that they have without a curriculum."""

    def __init__(self, candidates: Candidates, **options: Any):
        """Raises ValueError for options that cannot be used, DataError for pass rates that cannot
        be read, and if no row is left."""
        self._options = PassRateOptions(**options)
        self._options.check_files()
        self._rates = (
            _of_column(candidates, self._options.column)
            if self._options.column is not None
            else _of_samples(candidates, self._options)
        )
        self.rows = [n for n, rate in enumerate(self._rates) if self._options.keeps(rate)]
        if not self.rows:
            raise DataError(f"curriculum pass_rate: no row is left: {self._left_out()}")
        self._order = candidates.among(self.rows)
        self._drawn = 0
        self.note = f"curriculum pass_rate: {self._left_out()}{self._unrecorded()}"

    def next(self, count: int) -> list[int]:
        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        return self._order.take(numbers)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "rows_sha256": self._digest()}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises DataError if other rows stay than when the run was started."""
        self._drawn = state.get("drawn", 0)
        if state and state["rows_sha256"] != self._digest():
            raise DataError(
                "curriculum pass_rate: other rows stay than at the start of the stage. It cannot "
                "go on with changed rows or pass rates, also with run.changed_data=allow; restore "
                "them, or start a new run in another run.dir"
            )

    def histogram(self) -> Histogram:
        """Returns the rows by pass rate, with bars of their own for those of 0, of 1 and without a
        rate."""
        counts: dict[str, list[int]] = {label: [0, 0] for label in _labels()}
        for rate in self._rates:
            counts[_label(rate)][not self._options.keeps(rate)] += 1
        if not any(counts[_UNKNOWN]):
            del counts[_UNKNOWN]
        bars = [Bar(label, drawn, left_out) for label, (drawn, left_out) in counts.items()]
        return Histogram("Rows by pass rate", bars)

    def _left_out(self) -> str:
        """Returns how many rows are left out, and why."""
        rates = [rate for rate in self._rates if rate is not None]
        low = sum(rate <= self._options.above for rate in rates)
        high = sum(rate >= self._options.below for rate in rates)
        unknown = len(self._rates) - len(rates)
        said = "left out" if self._options.missing == "leave_out" else "kept"
        count = len(self._rates) - len(self.rows or ())
        return (
            f"{count} of {len(self._rates)} rows are left out: {low} with a pass rate of at most "
            f"{self._options.above:g}, {high} of at least {self._options.below:g}"
            + (f"; {unknown} without one are {said}" if unknown else "")
        )

    def _unrecorded(self) -> str:
        """Returns that the run of `rollouts` did not record all groups, if rows without a pass rate
        stay."""
        if self._options.rollouts is None or self._options.missing == "leave_out":
            return ""
        algorithms = _dynamic_algorithms(self._options.folder)
        if None not in self._rates or not algorithms:
            return ""
        return (
            f". {self._options.rollouts} sampled with dynamic_batches ({', '.join(algorithms)}), "
            "which drops groups of prompts that are always or never solved: such rows have no pass "
            "rate and are kept. Take the rates from `rl rollout` with "
            "stages.N.algorithm.dynamic_batches=0, or set missing: leave_out, which also leaves "
            "out prompts that were never sampled"
        )

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:16]


_UNKNOWN = "unknown"


def _labels() -> list[str]:
    between = [f"{n / _BINS:g} to {(n + 1) / _BINS:g}" for n in range(_BINS)]
    return ["0", *between, "1", _UNKNOWN]


def _label(rate: float | None) -> str:
    if rate is None:
        return _UNKNOWN
    if rate in (0.0, 1.0):
        return f"{rate:g}"
    return _labels()[1 + min(_BINS - 1, int(rate * _BINS))]


def _of_column(candidates: Candidates, column: str) -> list[float | None]:
    """Returns the pass rates in a column; None where it is absent, empty (CSV) or NaN (Parquet).
    Raises DataError for one that is no share, and if no row has a pass rate."""

    def rate_of(example: Example) -> float | str | None:
        value = example.columns.get(column)
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        try:
            rate = float(value)
        except (TypeError, ValueError):
            rate = math.inf
        if math.isnan(rate):
            return None
        if not 0 <= rate <= 1:
            return f"{example.where}: column {column!r} is no share from 0 to 1: {value!r}"
        return rate

    rates = candidates.values(rate_of)
    if problem := next((rate for rate in rates if isinstance(rate, str)), None):
        raise DataError(f"curriculum pass_rate: {problem}")
    if all(rate is None for rate in rates):
        raise DataError(f"curriculum pass_rate: no row has a column {column!r} with a value")
    return rates


def _of_samples(candidates: Candidates, options: PassRateOptions) -> list[float | None]:
    """Returns the pass rates of the prompts in the samples of a run, those of evaluations left out.
    Raises DataError for samples that cannot be read, and if they have none of the prompts."""
    rewards = defaultdict(list)
    try:
        for line in samples.read(options.folder):
            reward = line.get("reward")
            scored = isinstance(reward, (int, float)) and math.isfinite(reward)
            if scored and not line.get("eval"):
                rewards[_key(line.get("prompt"))].append(reward)
    except (ValueError, OSError) as error:
        raise DataError(f"curriculum pass_rate: {error}") from None
    solved_from = 1.0 if options.correct_at is None else options.correct_at
    rates = {key: float(at_least(values, solved_from).mean()) for key, values in rewards.items()}
    of_rows = candidates.values(lambda example: rates.get(_key(without_contents(example.prompt))))
    if all(rate is None for rate in of_rows):
        raise DataError(
            f"curriculum pass_rate: none of the {len(of_rows)} prompts of the data is in "
            f"{options.rollouts}/{SAMPLES} with a reward"
        )
    return of_rows


def _dynamic_algorithms(folder: Path) -> list[str]:
    """Returns the algorithms with which a run samples under `dynamic_batches`, each once."""
    stages = read_config(folder, []).get("stages")
    algorithms = [each.get("algorithm") for each in stages or () if isinstance(each, dict)]
    names = [
        str(each.get("name"))
        for each in algorithms
        if isinstance(each, dict) and each.get("dynamic_batches")
    ]
    return list(dict.fromkeys(names))


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
