"""Estimates from an evaluation, each with its 95% interval: accuracy, pass@k, maj@k, and the
difference of two models on the same problems. Imports numpy only.

P problems, G samples of each, D draws.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
Z = 1.959963984540054  # of the normal distribution, for 95%
DRAWS = 100
"""Draws of k samples of a problem whose mean is its maj@k."""
_RARE = 0.025  # chance of each side that a 95% interval leaves out


@dataclass(frozen=True)
class Estimate:
    """A mean over n problems, with its 95% interval low .. high."""

    value: float
    low: float
    high: float
    n: int


def wilson(share: np.ndarray, problems: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bound of the 95% interval of a share measured on `problems`
    problems (Wilson).

    It stays within 0..1 and has a width at 0 and 1 too. For a mean of other numbers in 0..1, such
    as pass@k, it is wider than needed: none vary more than numbers that are 0 or 1.
    """
    n = np.maximum(np.asarray(problems, float), 1)
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    spread = (
        Z * np.sqrt(np.maximum(share * (1 - share), 0) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    )
    low = np.where(np.asarray(share) <= 0, 0.0, np.clip(middle - spread, 0, 1))
    high = np.where(np.asarray(share) >= 1, 1.0, np.clip(middle + spread, 0, 1))
    return low, high


def mean(values_P: Values, weights_P: Values | None = None) -> Estimate | None:
    """Estimates the mean of a number in 0..1 over problems; None without a problem.

    A value that is NaN is left out. weights_P: how often each problem counts, for instance by its
    instructions; None: once. Where each value is 0 or 1 and counts once, or all are equal, the
    interval is Wilson's. Else it is 1.96 standard errors over problems on each side; a weighted
    mean is a ratio of two sums, and its standard error is the usual one of a ratio.
    """
    values = np.asarray(values_P, float)
    weights = np.ones(len(values)) if weights_P is None else np.asarray(weights_P, float)
    known = np.isfinite(values) & (weights > 0)
    values = values[known]
    weights = weights[known]
    n = len(values)
    if not n:
        return None
    value = float(np.average(values, weights=weights))
    equal_weights = bool(np.all(weights == weights[0]))
    is_share = equal_weights and bool(np.all((values == 0) | (values == 1)))
    if n == 1 or is_share or np.all(values == values[0]):
        low, high = wilson(np.asarray([value]), n)
        return Estimate(value, float(low[0]), float(high[0]), n)
    deviations = weights * (values - value)
    error = math.sqrt(n / (n - 1) * float(np.sum(deviations**2))) / float(np.sum(weights))
    return Estimate(value, max(0.0, value - Z * error), min(1.0, value + Z * error), n)


def shares(right_PG: np.ndarray) -> np.ndarray:
    """Returns float[P], the share of the scored samples of each problem that is right.

    right_PG: 1 right, 0 wrong, NaN without a score. A problem without a score is NaN.
    """
    known_PG = np.isfinite(right_PG)
    counts_P = known_PG.sum(axis=1)
    sums_P = np.where(known_PG, right_PG, 0.0).sum(axis=1)
    return np.divide(sums_P, counts_P, out=np.full(len(counts_P), np.nan), where=counts_P > 0)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns an unbiased estimate of the chance that one of k samples is correct (arXiv
    2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_shares(right_PG: np.ndarray, k: int) -> np.ndarray:
    """Returns float[P], pass@k of each problem; NaN for one with fewer than k scored samples.
    right_PG: as for `shares`."""
    scored_P = np.isfinite(right_PG).sum(axis=1).tolist()
    correct_P = (right_PG == 1).sum(axis=1).tolist()
    pairs = zip(scored_P, correct_P, strict=True)
    return np.asarray([pass_at_k(n, c, k) if n >= k else np.nan for n, c in pairs])


def majority_shares(
    right_PG: np.ndarray, answers_PG: Sequence[Sequence[Hashable]], k: int, seed: int = 0
) -> np.ndarray:
    """Returns float[P], maj@k of each problem: how often the answer that most of k samples give is
    right, over DRAWS draws of k of its scored samples.

    right_PG: as for `shares`. answers_PG: what each sample answers; None does not vote, and a draw
    in which nobody votes is wrong. Of answers with equally many votes the first of the draw wins.
    The draws of a problem follow from (seed, number of the problem, k). NaN for a problem with
    fewer than k scored samples.
    """
    result = np.full(len(right_PG), np.nan)
    for problem, (right_G, answers_G) in enumerate(zip(right_PG, answers_PG, strict=True)):
        scored = np.flatnonzero(np.isfinite(right_G))
        if len(scored) >= k:
            draws = np.random.default_rng((seed, problem, k))
            orders_DG = draws.permuted(np.tile(scored, (DRAWS, 1)), axis=1)
            result[problem] = _majority(right_G, answers_G, orders_DG[:, :k])
    return result


def _majority(right_G: np.ndarray, answers_G: Sequence[Hashable], drawn_DK: np.ndarray) -> float:
    """Returns the share of draws whose winning answer is right. drawn_DK: numbers of samples."""
    codes = {answer: code for code, answer in enumerate(dict.fromkeys(answers_G))}
    codes_G = np.asarray([-1 if answer is None else codes[answer] for answer in answers_G])
    votes_DK = codes_G[drawn_DK]
    counts_DK = (votes_DK[:, :, None] == votes_DK[:, None, :]).sum(axis=2)
    counts_DK[votes_DK < 0] = 0
    winners_D = counts_DK.argmax(axis=1)  # the first of several
    rows_D = np.arange(len(drawn_DK))
    voted_D = counts_DK[rows_D, winners_D] > 0
    return float(np.mean(np.where(voted_D, right_G[drawn_DK[rows_D, winners_D]] == 1, False)))


def paired_difference(
    before_P: Values,
    after_P: Values,
    weights_P: Values | None = None,
) -> Estimate | None:
    """Estimates by how much the mean over the same problems changes, after less before; None
    without a problem that both have.

    The interval is 1.96 standard errors of the differences on each side. Where all differences are
    equal, so that the standard error is 0, each side is p with (1 - p)^n = 2.5%: if more than a
    share p of all problems had another difference, n problems would rarely show none.
    """
    differences = np.asarray(after_P, float) - np.asarray(before_P, float)
    weights = np.ones(len(differences)) if weights_P is None else np.asarray(weights_P, float)
    known = np.isfinite(differences) & (weights > 0)
    differences = differences[known]
    weights = weights[known]
    n = len(differences)
    if not n:
        return None
    value = float(np.average(differences, weights=weights))
    if np.all(differences == differences[0]):
        spread = 1 - _RARE ** (1 / n)
    else:
        deviations = weights * (differences - value)
        spread = Z * math.sqrt(n / (n - 1) * float(np.sum(deviations**2)))
        spread /= float(np.sum(weights))
    return Estimate(value, max(-1.0, value - spread), min(1.0, value + spread), n)
