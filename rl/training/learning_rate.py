"""The learning rates of a stage by their formula (docs/configuration.md), on the host. Free of
jax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rl.config.changes import boundaries, in_force
from rl.config.run import RunConfig
from rl.config.stage import OptimizerOptions

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def learning_rate(
    options: OptimizerOptions, steps: int, updates_per_step: int, update: int
) -> float:
    """Returns the learning rate of an update of a stage, counted from 0.

    The warm-up of w updates rises by equal parts; update w has the peak. Then the rate is constant,
    or falls from step to step: all updates of a step have one rate, and the last step has
    `final_fraction` of the peak.
    """
    peak = options.learning_rate
    warm = options.warmup_steps
    final = options.final_fraction
    if update < warm:
        return peak * (update + 1) / (warm + 1)
    if options.schedule == "constant":
        return peak
    first = warm // updates_per_step
    last = steps - 1
    t = min(1.0, (update // updates_per_step - first) / max(1, last - first))
    share = 1 - t if options.schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    return peak * (final + (1 - final) * share)


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
        updates = range(max(0, start - waits) * count, max(0, end - waits) * count)
        rates += [learning_rate(getattr(stage, key), steps, count, update) for update in updates]
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
