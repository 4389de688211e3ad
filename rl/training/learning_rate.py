"""The formula of learning rates (docs/configuration.md), and the learning rates of a stage on the
host. Free of jax."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from rl.config.changes import boundaries, in_force
from rl.config.run import RunConfig
from rl.config.stage import OptimizerOptions

if TYPE_CHECKING:
    import jax

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def learning_rate(
    options: OptimizerOptions,
    steps: int,
    updates_per_step: int,
    update: int | np.ndarray | jax.Array,
    xp: ModuleType = np,
) -> np.ndarray | jax.Array:
    """Returns the learning rate of an update of a stage, counted from 0, or of several.

    The warm-up of w updates rises by equal parts; update w has the peak. Then the rate is constant,
    or falls from step to step: all updates of a step have one rate, and the last step has
    `final_fraction` of the peak.

    xp: the module that computes it: numpy, or jax.numpy in a compiled program.
    """
    peak = options.learning_rate
    warm = options.warmup_steps
    final = options.final_fraction
    first = warm // updates_per_step
    length = max(1, steps - 1 - first)
    done = update // updates_per_step - first
    if options.schedule == "linear":
        done = xp.clip(done, 0, length)
        rate = _between(peak, peak * final, 1 - done / length)
    elif options.schedule == "cosine":
        done = xp.minimum(done, length)  # as optax has it, which keeps the bits of its schedules
        rate = peak * _between(1, final, (1 + xp.cos(np.pi * done / length)) / 2)
    else:
        rate = peak
    if not warm:
        return xp.broadcast_to(rate, xp.shape(update))
    warmed = xp.clip(update, 0, warm)
    return xp.where(update < warm, _between(peak / (warm + 1), peak, 1 - warmed / warm), rate)


def _between(first: float, last: float, share: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Returns share * first + (1 - share) * last."""
    return (first - last) * share + last


def stage_rates(config: RunConfig, index: int, key: str, waits: int = 0) -> list[float]:
    """Returns the learning rate of each update of a stage.

    key: `optimizer` or `critic`. waits: steps of the stage before its first update, which are left
    out. Changes of a run that went on hold from their step on.
    """
    rates = []
    last = config.stages[index].total_steps
    starts = [0, *sorted(step for step in boundaries(config, index) if step < last)]
    for start, end in pairwise([*starts, last]):
        stage = in_force(config, index, start + 1).stages[index]
        count = stage.updates_per_step
        steps = max(0, stage.total_steps - waits)
        updates = np.arange(max(0, start - waits) * count, max(0, end - waits) * count)
        rates += learning_rate(getattr(stage, key), steps, count, updates).tolist()
    return rates


def drawn(rates: Sequence[float], updates_per_step: int = 1) -> str:
    """Returns the learning rates of the updates of a stage as a line of bars, with the highest and
    the last one."""
    if not rates:
        return "no updates"
    largest = max(rates)
    steps = len(rates) // updates_per_step
    width = min(_WIDTH, len(rates))
    shown = [rates[round(place * (len(rates) - 1) / max(1, width - 1))] for place in range(width)]
    bars = "".join(_BARS[round(rate / largest * (len(_BARS) - 1))] for rate in shown)
    highest = rates.index(largest) // updates_per_step + 1
    return (
        f"{bars}  at most {largest:.3g} (step {highest}), {rates[-1]:.3g} in the last of "
        f"{steps:,} steps"
    )
