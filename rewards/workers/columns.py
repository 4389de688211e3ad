"""Converts columns to JSON types, and splits completions into calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewards.registry import RewardError
from rewards.workers.media import Content


def split_groups(count: int, groups: list[int] | None) -> list[list[int]]:
    """Returns the samples of each call, in the order in which the groups first occur."""
    if groups is None:
        return [[sample] for sample in range(count)]
    if len(groups) != count:
        raise RewardError(f"there are {count} prompts, but {len(groups)} groups")
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(int(group), []).append(sample)
    return list(members.values())


def plain(value: object, where: str) -> Any:
    """Turns numpy arrays, numpy scalars and tuples into types that JSON has; pictures and sounds
    stay as they are.

    Raises RewardError for other types.
    """
    if value is None or (
        isinstance(value, (str, int, float)) and not isinstance(value, np.generic)
    ):
        return value
    if isinstance(value, Content):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufUO":
        return plain(value.tolist(), where)
    raise RewardError(
        f"{where} is a {type(value).__name__}; rewards receive text, numbers, booleans, None, "
        "lists and dicts of them"
    )
