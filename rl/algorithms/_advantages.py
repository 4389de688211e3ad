"""Computes advantages relative to a group, on the host.

Shapes: P prompts, G completions of one prompt (the group), F reward functions, T tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rewards.workers.rounding import all_equal, without_rounding


def combined_advantages(
    rewards: ArrayLike, weights: ArrayLike | None, std_eps: float
) -> np.ndarray:
    """Computes float[P,G] advantages of several reward functions: the z-score of a weighted sum of
    group z-scores.

    rewards: float[P,G,F], or float[P,G] for one function. weights: float[F]; None: 1 each. The
    z-score of each function is taken within its group, the z-score of the weighted sum over all
    completions. A missing score (not finite) does not count. Completions without a score, and
    groups without a difference in any function, get exactly 0.
    """
    rewards = np.asarray(rewards)
    rewards_PGF = rewards[..., None] if rewards.ndim == 2 else rewards
    dtype = precision(rewards)
    each_FPG = np.stack(
        [
            group_advantages(one, "group", std_eps)
            for one in np.moveaxis(rewards_PGF.astype(np.float64), -1, 0)
        ]
    )
    weights_F = np.ones(len(each_FPG)) if weights is None else np.asarray(weights, np.float64)
    sums = np.tensordot(weights_F, each_FPG, 1)
    added = np.tensordot(np.abs(weights_F), np.abs(each_FPG), 1)
    sums_PG = without_rounding(sums.reshape(-1), added.reshape(-1)).reshape(sums.shape)
    scored_PG = np.isfinite(rewards_PGF.astype(np.float64)).any(-1)
    mean, std = moments(sums_PG.reshape(1, -1), scored_PG.reshape(1, -1))
    told_apart_PG = scored_PG & np.asarray(each_FPG.any(axis=(0, 2)))[:, None]
    return np.where(told_apart_PG & (std > 0), (sums_PG - mean) / (std + std_eps), 0.0).astype(
        dtype
    )


def group_advantages(rewards: ArrayLike, scale: str, std_eps: float) -> np.ndarray:
    """Returns rewards minus the mean of their group, over a standard deviation (with n - 1) plus
    `std_eps`.

    scale: the standard deviation. group: of the group; batch: of all rewards; none: no division;
    others: mean and standard deviation are of the other completions of the group, without division
    if the deviation is 0 (NeMo-RL). A completion without a score (not finite) does not count and
    gets 0. Rewards that are equal but for rounding (`without_rounding`), and a single one, give
    exactly 0.
    float[P,G] -> float[P,G], computed in float64; float32 stays float32. Raises ValueError for
    another shape.
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 2:
        raise ValueError(
            f"rewards must have shape [prompts, completions], got {list(rewards.shape)}"
        )
    dtype = precision(rewards)
    scored_PG = np.isfinite(rewards.astype(np.float64))
    rewards_PG = np.where(scored_PG, without_rounding(rewards), 0)
    mean_P1, std_P1 = moments(rewards_PG, scored_PG)
    varied_P1 = std_P1 > 0
    if scale == "others":
        group = rewards_PG.shape[1]
        others_PGG = scored_PG[:, None, :] & ~np.eye(group, dtype=bool)
        mean_PG1, std_PG1 = moments(
            np.broadcast_to(rewards_PG[:, None, :], others_PGG.shape), others_PGG
        )
        centred_PG = rewards_PG - mean_PG1[..., 0]
        std = std_PG1[..., 0]
        divisor = np.where(std > 0, std + std_eps, 1.0)
    else:
        centred_PG = rewards_PG - mean_P1
        batch_std = moments(rewards_PG.reshape(1, -1), scored_PG.reshape(1, -1))[1]
        divisor = {"group": std_P1 + std_eps, "batch": batch_std + std_eps, "none": np.ones(1)}[
            scale
        ]
    return np.where(
        scored_PG & varied_P1, centred_PG / np.where(varied_P1, divisor, 1.0), 0.0
    ).astype(dtype)


def completion_mask(
    lengths: ArrayLike | None, token_kl: ArrayLike | None, mask: ArrayLike | None
) -> np.ndarray:
    """Returns bool[P,G,T]: `mask`, or if it is None the first `lengths` tokens of each completion.

    T is the width of `token_kl`, or the longest length without it. Raises ValueError without mask
    and lengths.
    """
    if mask is not None:
        return np.asarray(mask) != 0
    if lengths is None:
        raise ValueError("advantages of tokens need `mask`, or `lengths`")
    lengths_PG = np.asarray(lengths)
    width = lengths_PG.max(initial=0) if token_kl is None else np.shape(token_kl)[-1]
    return np.arange(width) < lengths_PG[..., None]


def scored_mean(rewards: ArrayLike, weights: ArrayLike | None = None) -> np.ndarray:
    """Returns float64[P,1], the weighted mean of the scores of each group; 0 without a score."""
    rewards_PG = without_rounding(rewards)
    weights_PG = np.where(
        np.isfinite(rewards_PG), 1.0 if weights is None else np.asarray(weights, np.float64), 0.0
    )
    total_P1 = weights_PG.sum(axis=1, keepdims=True)
    return (weights_PG * np.nan_to_num(rewards_PG)).sum(axis=1, keepdims=True) / np.where(
        total_P1 > 0, total_P1, 1.0
    )


def centred(rewards: ArrayLike, weights: ArrayLike | None = None) -> np.ndarray:
    """Returns float[P,G], rewards minus the weighted mean of their group.

    Groups of equal rewards, single scores and missing scores give exactly 0.
    """
    rewards = np.asarray(rewards)
    dtype = precision(rewards)
    scored_PG = np.isfinite(rewards.astype(np.float64))
    rewards_PG = without_rounding(rewards)
    varied_P1 = moments(np.where(scored_PG, rewards_PG, 0), scored_PG)[1] > 0
    return np.where(
        scored_PG & varied_P1, rewards_PG - scored_mean(rewards_PG, weights), 0.0
    ).astype(dtype)


def whiten(values: ArrayLike, mask: ArrayLike) -> np.ndarray:
    """Returns (values - mean) / sqrt(variance + 1e-8) over masked tokens, with n - 1.

    Other tokens, a single token and equal values give 0.
    """
    values = np.asarray(values)
    chosen_tokens = np.asarray(mask) != 0
    chosen = values[chosen_tokens].astype(np.float64)
    whitened = np.zeros(values.shape, values.dtype)
    if chosen.size > 1 and not all_equal(values[chosen_tokens]):
        whitened[chosen_tokens] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return whitened


def precision(rewards: ArrayLike) -> type:
    """Returns the dtype of advantages: float32 for float32 rewards, else float64."""
    return np.float32 if np.asarray(rewards).dtype == np.float32 else np.float64


def moments(values: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation (n - 1) of valid values over the last axis, which stays.

    The standard deviation of equal values is exactly 0.
    """
    count = valid.sum(-1, keepdims=True)
    mean = np.where(valid, values, 0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(valid, (values - mean) ** 2, 0).sum(-1, keepdims=True)
    highest = np.where(valid, values, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    lowest = np.where(valid, values, np.inf).min(-1, keepdims=True, initial=np.inf)
    return mean, np.where(highest > lowest, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)
