"""Defines the scores of completions, and the faults of the reward functions.

Shapes: N completions, F functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rewards.workers.rounding import all_equal, without_rounding

_SHOWN_CHARACTERS = 500

COUNTS = ("reward/faults", "reward/timeouts", "reward/not_applicable", "reward/retried")
"""Metrics of a call that are counts: those of several calls add up."""


@dataclass(frozen=True)
class RewardFault:
    """A sample to which a function gave no score.

    kind: raised, timeout, died (the process ended), wrong_type, wrong_length, not_finite, or load
    (the worker could not
        import the function).
    """

    function: str
    sample: int
    kind: str
    traceback: str
    prompt: object
    completion: object

    def sample_text(self) -> str:
        """Returns prompt and completion for a message, shortened."""
        return f"prompt: {_shortened(self.prompt)}\ncompletion: {_shortened(self.completion)}"


@dataclass(frozen=True)
class Scores:
    """The scores of N completions.

    rewards: float64[N, F]; NaN: no score.
    total: float64[N], weighted sum of the scores of a sample; NaN if it has none or any function
    faulted.
    names: short names of the F functions.
    faults: by function, then sample.
    logs: sample -> function -> what the function printed, or returned with the score.
    causes: function -> why its first failed call with several completions failed; each was then
    scored alone.
    seconds: duration of each call of a function, on all processes.
    """

    rewards: np.ndarray
    total: np.ndarray
    names: tuple[str, ...]
    faults: list[RewardFault]
    metrics: dict[str, float]
    logs: dict[int, dict[str, str]] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    seconds: Sequence[float] = ()

    @classmethod
    def of_nothing(cls, count: int) -> Scores:
        """Returns what `count` completions have that no function scores."""
        return cls(np.zeros((count, 0)), np.full(count, math.nan), (), [], {})


def weighted_sums(
    rewards: np.ndarray,
    weights: Sequence[float],
    faulted: Sequence[int],
    groups: Iterable[Sequence[int]],
) -> np.ndarray:
    """Returns `Scores.total` of rewards float64[N, F].

    faulted: samples on which a function faulted. groups: the samples of each group, in which sums
    that differ by rounding become the same.
    """
    missing = np.isnan(rewards)
    weighted = np.where(missing, 0.0, rewards * np.array(weights))
    total = weighted.sum(axis=1)
    summed = np.abs(weighted).sum(axis=1)
    total[missing.all(axis=1)] = math.nan
    total[faulted] = math.nan
    for group in groups:
        total[group] = without_rounding(total[group], summed[group])
    return total


def statistics(rewards: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Returns mean and standard deviation of each function's scores float64[N, F], as metrics;
    nothing of a function without a score."""
    metrics = {}
    for slot, name in enumerate(names):
        scores = rewards[~np.isnan(rewards[:, slot]), slot]
        if scores.size:
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            metrics[f"rewards/{name}/std"] = 0.0 if all_equal(scores) else float(scores.std())
    return metrics


def call_times(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the total duration of calls, its median and its 99th percentile, as metrics; nothing
    without a call."""
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, (50, 99))
    return {
        "time/reward_calls": float(sum(seconds)),
        "time/reward_p50_s": float(p50),
        "time/reward_p99_s": float(p99),
    }


def _shortened(value: object) -> str:
    text = repr(value)
    return (
        text
        if len(text) <= _SHOWN_CHARACTERS
        else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    )
