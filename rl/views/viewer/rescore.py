"""Runs rewards over recorded completions, and compares the scores with the recorded ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from rewards import RewardError, Runner, RunnerOptions
from rewards.registry import REWARD_MODEL
from rewards.text import in_form_of
from rewards.workers.rounding import all_equal
from rl.errors import ConfigError, DataError
from rl.records.schema import SampleRecord
from rl.views.report.samples import sample_length
from rl.views.viewer.index import Index
from rl.views.viewer.search import SamplePlace, places

_BATCH = 2048  # samples that are scored together; groups stay together


@dataclass(frozen=True)
class Rescored:
    """One sample with its recorded rewards (`record`) and its new ones. A score is NaN where there
    is none."""

    place: SamplePlace
    record: SampleRecord
    reward: float
    scores: dict[str, float]
    faults: dict[str, str]
    log: dict[str, str]

    @property
    def before(self) -> float:
        """The recorded reward, NaN if there is none."""
        value = self.record.get("reward")
        return float(value) if isinstance(value, (int, float)) else math.nan

    @property
    def changed(self) -> bool:
        """Whether the reward differs by more than rounding, or was or is missing."""
        if math.isnan(self.before) or math.isnan(self.reward):
            return math.isnan(self.before) != math.isnan(self.reward)
        return not math.isclose(self.before, self.reward, rel_tol=1e-6, abs_tol=1e-9)


def rescore(
    index: Index,
    rows: np.ndarray,
    options_of: Callable[[str], RunnerOptions],
    limits: dict[str, int],
) -> Iterator[Rescored]:
    """Yields the samples with their new scores, stage by stage, the completions of a prompt in one
    call.

    rows: ids of the samples. options_of: the rewards of a stage. limits: stage ->
    max_new_tokens, for rewards that take it. Raises ConfigError for rewards that cannot be run
    here, DataError for a sample that has changed.
    """
    stages = index.names["stage"]
    every = sorted(
        places(index, rows),
        key=lambda place: (
            stages.index(place.numbers.stage),
            place.numbers.step,
            place.numbers.prompt,
            place.numbers.sample,
        ),
    )
    start = 0
    while start < len(every):
        stage = every[start].numbers.stage
        end = start
        while end < len(every) and every[end].numbers.stage == stage:
            end += 1
        yield from _stage(every[start:end], options_of(stage), limits.get(stage))
        start = end


def _stage(
    every: Sequence[SamplePlace], options: RunnerOptions, limit: int | None
) -> Iterator[Rescored]:
    if any(name == REWARD_MODEL for name, _, _ in options.functions):
        raise ConfigError(
            "--rescore: the reward `reward_model` needs its model; leave it out of the "
            "configuration"
        )
    try:
        runner = Runner(options)
    except RewardError as error:
        raise ConfigError(f"--rescore: {error}") from None
    try:
        for batch in _batches(every):
            yield from _batch(runner, batch, limit)
    except RewardError as error:
        raise ConfigError(f"--rescore: {error}") from None
    finally:
        runner.close()


def _batches(every: Sequence[SamplePlace]) -> Iterator[Sequence[SamplePlace]]:
    start = 0
    while start < len(every):
        end = min(start + _BATCH, len(every))
        while end < len(every) and _group(every[end]) == _group(every[end - 1]):
            end += 1
        yield every[start:end]
        start = end


def _batch(runner: Runner, batch: Sequence[SamplePlace], limit: int | None) -> Iterator[Rescored]:
    records = [_record(each) for each in batch]
    names = list(dict.fromkeys(name for record in records for name in record.get("columns") or {}))
    columns: dict[str, Any] = {
        name: [(each.get("columns") or {}).get(name) for each in records] for name in names
    }
    columns["completion_lengths"] = [sample_length(each) for each in records]
    columns["raw"] = [each.get("raw", each["completion"]) for each in records]
    columns["truncated"] = [each.get("finish") == "length" for each in records]
    if limit is not None:
        columns["max_new_tokens"] = limit
    numbers: dict[tuple[int, int], int] = {}
    groups = [numbers.setdefault(_group(each), len(numbers)) for each in batch]
    prompts = [each["prompt"] for each in records]
    completions = [in_form_of(each["prompt"], each["completion"]) for each in records]
    scores = runner.start(prompts, completions, columns, groups).result()
    faults: dict[int, dict[str, str]] = {}
    for fault in scores.faults:
        faults.setdefault(fault.sample, {})[fault.function] = fault.kind
    for number, (place, record) in enumerate(zip(batch, records, strict=True)):
        own = dict(zip(scores.names, scores.rewards[number].tolist(), strict=True))
        yield Rescored(
            place,
            record,
            float(scores.total[number]),
            own,
            faults.get(number, {}),
            scores.logs.get(number, {}),
        )


class Means(TypedDict):
    """A mean over the scored samples; None without one."""

    before: float | None
    after: float | None


class Counts(TypedDict):
    before: int
    after: int


class FunctionSummary(Means):
    """The scores of a function. faults: samples on which it failed."""

    faults: int


class Summary(TypedDict):
    """What scoring again changed. changed, up, down: samples. functions: by name. groups: those of
    more than one completion. faults: how often each kind occurred."""

    samples: int
    changed: int
    up: int
    down: int
    unscored: Counts
    reward: Means
    functions: dict[str, FunctionSummary]
    groups: int
    groups_with_signal: Counts
    faults: dict[str, int]


def summary(every: Sequence[Rescored]) -> Summary:
    """Returns counts, means and the groups that have a signal, before and after. Means leave out
    unscored samples."""
    before = np.array([each.before for each in every])
    after = np.array([each.reward for each in every])
    names = sorted(
        {name for each in every for name in (*each.scores, *(each.record.get("rewards") or {}))}
    )
    functions: dict[str, FunctionSummary] = {}
    for name in names:
        old = [(each.record.get("rewards") or {}).get(name) for each in every]
        new = [each.scores.get(name, math.nan) for each in every]
        functions[name] = {
            "before": _mean([math.nan if value is None else float(value) for value in old]),
            "after": _mean(new),
            "faults": sum(name in each.faults for each in every),
        }
    groups: dict[tuple[str, int, int], list[int]] = {}
    for number, each in enumerate(every):
        if each.record.get("eval") is not True:
            groups.setdefault((each.place.numbers.stage, *_group(each.place)), []).append(number)
    members = [group for group in groups.values() if len(group) > 1]
    return {
        "samples": len(every),
        "changed": sum(each.changed for each in every),
        "up": int(np.sum(after > before)),
        "down": int(np.sum(after < before)),
        "unscored": {"before": int(np.isnan(before).sum()), "after": int(np.isnan(after).sum())},
        "reward": {"before": _mean(before), "after": _mean(after)},
        "functions": functions,
        "groups": len(members),
        "groups_with_signal": {
            "before": _signals(before, members),
            "after": _signals(after, members),
        },
        "faults": dict(Counter(kind for each in every for kind in each.faults.values())),
    }


def _signals(rewards: np.ndarray, groups: Sequence[Sequence[int]]) -> int:
    """Counts the groups whose completions have different rewards."""
    return sum(not all_equal(rewards[list(group)]) for group in groups)


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else None


def _group(place: SamplePlace) -> tuple[int, int]:
    return place.numbers.step, place.numbers.prompt


def _record(place: SamplePlace) -> SampleRecord:
    try:
        return place.record()
    except (OSError, ValueError):
        raise DataError(
            f"{place.path}: the run has changed its samples in the meantime; try again"
        ) from None
