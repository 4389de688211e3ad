"""Schedules of the coefficients of a loss over the steps of a stage. Free of jax."""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def scheduled(shape: Shape, start: float, end: float | None, progress: float) -> float:
    """Returns a coefficient at `progress`, the share of the stage's steps that are done, bounded to
    0 .. 1.

        constant   start
        linear     start + (end - start) t
        cosine     end + (start - end) (1 + cos(pi t)) / 2

    end: None is `start`. Raises ValueError for another shape.
    """
    t = min(1.0, max(0.0, progress))
    last = start if end is None else end
    if shape == "constant":
        return start
    if shape == "linear":
        return start + (last - start) * t
    if shape == "cosine":
        return last + (start - last) * (1.0 + math.cos(math.pi * t)) / 2.0
    raise ValueError(f"schedule: {shape!r} must be constant, linear or cosine")
