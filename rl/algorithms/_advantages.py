"""Advantages relative to a group, and what they are made of. On the host.

Shapes: P prompts, G completions of one prompt (the group), F reward functions, T tokens.
"""

from __future__ import annotations

import numpy as np


def combined_advantages(rewards, weights, std_eps: float) -> np.ndarray:
    """float[P,G,F] rewards, or float[P,G] of one function -> float[P,G]: the z-score in its group of each function, their
    weighted sum, and the z-score of that over all completions. A function without a score for a completion takes no part there;
    a completion without any, and a group in which no function tells its completions apart, get exactly 0."""
    rewards = np.asarray(rewards)
    rewards_PGF = rewards[..., None] if rewards.ndim == 2 else rewards
    dtype = precision(rewards)
    each_FPG = np.stack(
        [group_advantages(one, "group", std_eps) for one in np.moveaxis(rewards_PGF.astype(np.float64), -1, 0)]
    )
    weights_F = np.ones(len(each_FPG)) if weights is None else np.asarray(weights, np.float64)
    sums_PG = np.tensordot(weights_F, each_FPG, 1)
    scored_PG = np.isfinite(rewards_PGF.astype(np.float64)).any(-1)
    mean, std = moments(sums_PG.reshape(1, -1), scored_PG.reshape(1, -1))
    told_apart_PG = scored_PG & each_FPG.any(axis=(0, 2))[:, None]
    return np.where(told_apart_PG & (std > 0), (sums_PG - mean) / (std + std_eps), 0.0).astype(dtype)


def group_advantages(rewards, scale: str, std_eps: float) -> np.ndarray:
    """Rewards minus the mean of their group, over a standard deviation (with n - 1) plus `std_eps`.

    `scale`: group: of the group; batch: of all rewards; none: no division; others: both mean and deviation are of the
    other completions of the group, and without a deviation there is no division (NeMo-RL).
    A completion without a score (not finite) takes no part and gets 0. Equal rewards, and a single one, give exactly 0:
    the rounding of a mean over a small `std_eps` would not.
    float[P,G] -> float[P,G], computed in float64; float32 stays float32.
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [prompts, completions], got {list(rewards.shape)}")
    dtype = precision(rewards)
    scored_PG = np.isfinite(rewards.astype(np.float64))
    rewards_PG = np.where(scored_PG, rewards, 0).astype(np.float64)
    mean_P1, std_P1 = moments(rewards_PG, scored_PG)
    varied_P1 = std_P1 > 0
    if scale == "others":
        group = rewards_PG.shape[1]
        others_PGG = scored_PG[:, None, :] & ~np.eye(group, dtype=bool)
        mean_PG1, std_PG1 = moments(np.broadcast_to(rewards_PG[:, None, :], others_PGG.shape), others_PGG)
        centred_PG, std = rewards_PG - mean_PG1[..., 0], std_PG1[..., 0]
        divisor = np.where(std > 0, std + std_eps, 1.0)
    else:
        centred_PG = rewards_PG - mean_P1
        batch_std = moments(rewards_PG.reshape(1, -1), scored_PG.reshape(1, -1))[1]
        divisor = {"group": std_P1 + std_eps, "batch": batch_std + std_eps, "none": np.ones(1)}[scale]
    return np.where(scored_PG & varied_P1, centred_PG / np.where(varied_P1, divisor, 1.0), 0.0).astype(dtype)


def counted(lengths, token_kl, mask) -> np.ndarray:
    """bool[P,G,T]: `mask`, or the first `lengths` of as many tokens as `token_kl` has (without it, as the longest has)."""
    if mask is not None:
        return np.asarray(mask) != 0
    if lengths is None:
        raise ValueError("advantages of tokens need `mask`, or `lengths`")
    lengths_PG = np.asarray(lengths)
    width = lengths_PG.max(initial=0) if token_kl is None else np.shape(token_kl)[-1]
    return np.arange(width) < lengths_PG[..., None]


def scored_mean(rewards, weights=None) -> np.ndarray:
    """float64[P,1]: the mean of each group's scores, weighted; 0 where there is none."""
    rewards_PG = np.asarray(rewards, np.float64)
    weights_PG = np.where(np.isfinite(rewards_PG), 1.0 if weights is None else np.asarray(weights, np.float64), 0.0)
    total_P1 = weights_PG.sum(axis=1, keepdims=True)
    return (weights_PG * np.nan_to_num(rewards_PG)).sum(axis=1, keepdims=True) / np.where(total_P1 > 0, total_P1, 1.0)


def centred(rewards, weights=None) -> np.ndarray:
    """float[P,G]: rewards less the mean of their group, weighted; exactly 0 in groups of equal rewards, for a single score and
    without one."""
    rewards = np.asarray(rewards)
    dtype = precision(rewards)
    scored_PG = np.isfinite(rewards.astype(np.float64))
    varied_P1 = moments(np.where(scored_PG, rewards, 0).astype(np.float64), scored_PG)[1] > 0
    return np.where(scored_PG & varied_P1, rewards - scored_mean(rewards, weights), 0.0).astype(dtype)


def whiten(values, mask) -> np.ndarray:
    """(values - mean) / sqrt(variance + 1e-8) over masked tokens, with n - 1; 0 elsewhere, for a single token and where all are
    equal."""
    values, mask = np.asarray(values), np.asarray(mask) != 0
    chosen = values[mask].astype(np.float64)
    whitened = np.zeros(values.shape, values.dtype)
    if chosen.size > 1 and np.ptp(chosen) > 0:
        whitened[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return whitened


def precision(rewards) -> type:
    """Of advantages: float32 for rewards in float32, else float64."""
    return np.float32 if np.asarray(rewards).dtype == np.float32 else np.float64


def moments(values: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n - 1) of valid values over the last axis, kept; exactly 0 where all are equal."""
    count = valid.sum(-1, keepdims=True)
    mean = np.where(valid, values, 0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(valid, (values - mean) ** 2, 0).sum(-1, keepdims=True)
    highest = np.where(valid, values, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    lowest = np.where(valid, values, np.inf).min(-1, keepdims=True, initial=np.inf)
    return mean, np.where(highest > lowest, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)
