"""Says which rewards are equal: those that differ by no more than the rounding of the sums that
they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_UNITS = {np.dtype(np.float32): 4}  # in the last place of the largest number; of others _MOST_UNITS
_MOST_UNITS = 256


def without_rounding(values: ArrayLike, summed: ArrayLike | None = None) -> np.ndarray:
    """Returns float64 values, in which those of a group (the last axis) that differ only by
    rounding are the same.

    Two values that follow each other in size are equal if their distance is at most 256 units in
    the last place (2^-44; 4 units, 2^-21, for float32 arrays) of the largest absolute number among
    the group's values and `summed`, and all values that are equal in this way become the smallest
    of them. Values that floats hold exactly stay as they are. Values that are not finite stay, and
    equal no others.

    summed: float[...], the sums of the absolute numbers that were added up to each value, if these
    are larger.
    """
    given = np.asarray(values)
    result = given.astype(np.float64)
    if result.ndim == 0 or result.shape[-1] == 0:
        return result
    finite = np.isfinite(result)
    largest = np.abs(np.where(finite, result, 0.0)).max(-1, keepdims=True)
    if summed is not None:
        added = np.asarray(summed, np.float64)
        largest = np.maximum(
            largest, np.where(np.isfinite(added), added, 0.0).max(-1, keepdims=True)
        )
    precision = np.float32 if given.dtype == np.float32 else np.float64
    bound = largest * np.finfo(precision).eps * _UNITS.get(given.dtype, _MOST_UNITS)
    order = np.argsort(np.where(finite, result, np.inf), axis=-1, kind="stable")
    ascending = np.take_along_axis(np.where(finite, result, np.inf), order, -1)
    with np.errstate(invalid="ignore"):
        apart = np.diff(ascending, axis=-1) > bound
    positions = np.arange(result.shape[-1])
    begins = np.concatenate([np.ones_like(finite[..., :1]), apart], axis=-1)
    first = np.maximum.accumulate(np.where(begins, positions, 0), axis=-1)
    merged = np.empty_like(result)
    np.put_along_axis(merged, order, np.take_along_axis(ascending, first, -1), -1)
    return np.where(finite, merged, result)


def all_equal(values: ArrayLike) -> bool:
    """Tells whether all finite values are equal but for rounding; true without one."""
    flat = np.asarray(values).reshape(-1)
    finite = flat[np.isfinite(flat)]
    return bool(finite.size == 0 or np.ptp(without_rounding(finite)) == 0)


def at_least(values: ArrayLike, threshold: float) -> np.ndarray:
    """Returns where values are at least `threshold`, but for rounding. A value that is not finite
    is not."""
    array = np.asarray(values, np.float64)
    pairs = without_rounding(np.stack([array, np.full_like(array, threshold)], axis=-1))
    return np.isfinite(array) & (pairs[..., 0] >= pairs[..., 1])
