"""Metrics of a step by the source of its rows.

P prompts, G completions of each, N rows, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rewards import Scores
from rewards.workers.rounding import without_rounding
from rl.stages.sampling.reward_statistics import reward_statistics
from rollout.collect import Rollouts


def of_rollouts(rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """Returns source/NAME/... of each source that has prompts in the step, by the names of
    docs/metrics.md; {} for data of one source."""
    sources = [group.problem.example.source for group in rollouts.groups]
    totals_PG = without_rounding(scores.total.reshape(len(sources), -1))
    lengths_PG = np.asarray(
        [[trajectory.length for trajectory in group.trajectories] for group in rollouts.groups]
    )
    result: dict[str, float] = {}
    for source in sorted({each for each in sources if each is not None}):
        rows = np.flatnonzero([each == source for each in sources])
        statistics = reward_statistics(totals_PG[rows])
        result[f"source/{source}/rows"] = float(len(rows))
        result[f"source/{source}/mean_length"] = float(lengths_PG[rows].mean())
        if statistics is not None:
            result[f"source/{source}/reward_mean"] = statistics.mean
            result[f"source/{source}/frac_zero_std"] = statistics.frac_zero_std
    return result


def numbers_by_prefix(
    prefix: str, count: int, sources: Sequence[str | None]
) -> dict[str, list[int]]:
    """Returns the numbers of all of `count` rows, and of those of each source, by the beginning of
    the names of their metrics: `prefix`, and `prefix` with the source. sources: of each row; () for
    rows without sources."""
    result = {prefix: [*range(count)]}
    for name in sorted({each for each in sources if each is not None}):
        result[f"{prefix}{name}/"] = [n for n, each in enumerate(sources) if each == name]
    return result


def of_rows(sources: Sequence[str]) -> dict[str, float]:
    """Returns source/NAME/rows of each source of the rows of a step."""
    return {f"source/{name}/rows": float(count) for name, count in sorted(Counter(sources).items())}


def of_losses(sources: Sequence[str], logp_NT: np.ndarray, mask_NT: np.ndarray) -> dict[str, float]:
    """Returns source/NAME/nll: the mean of -logp over the tokens of each source that are trained
    on."""
    result = {}
    trained_NT = mask_NT != 0
    for name in sorted(set(sources)):
        chosen_NT = trained_NT & np.asarray([each == name for each in sources])[:, None]
        if chosen_NT.any():
            result[f"source/{name}/nll"] = float(-logp_NT[chosen_NT].mean(dtype=np.float64))
    return result
