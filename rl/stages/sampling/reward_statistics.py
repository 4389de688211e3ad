"""Statistics of the rewards of groups.

P prompts, G trajectories of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rewards.workers.rounding import all_equal


class RewardStatistics(NamedTuple):
    """mean: of all rewards. frac_zero_std: share of the groups with equal rewards, among those with
    a reward."""

    mean: float
    frac_zero_std: float


def reward_statistics(totals_PG: np.ndarray) -> RewardStatistics | None:
    """Returns the statistics of float64[P,G], NaN without a reward; None if all are."""
    scored = totals_PG[np.isfinite(totals_PG)]
    if not scored.size:
        return None
    groups = totals_PG[np.isfinite(totals_PG).any(axis=1)]
    zero_std = [all_equal(group) for group in groups]
    return RewardStatistics(float(scored.mean()), float(np.mean(zero_std)))
