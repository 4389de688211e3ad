"""The learning rates of a stage by their formula (docs/configuration.md), on the host. Free of jax."""

from __future__ import annotations

import math

from rl.config.stage import OptimizerOptions

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def learning_rate(options: OptimizerOptions, steps: int, updates_per_step: int, update: int) -> float:
    """Returns the learning rate of an update of a stage, counted from 0.

    The warm-up of w updates rises by equal parts; update w has the peak. Then the rate is constant, or falls from step
    to step: all updates of a step have one rate, and the last step has `final_fraction` of the peak.
    """
    peak, warm, final = options.learning_rate, options.warmup_steps, options.final_fraction
    if update < warm:
        return peak * (update + 1) / (warm + 1)
    if options.schedule == "constant":
        return peak
    first, last = warm // updates_per_step, steps - 1
    t = min(1.0, (update // updates_per_step - first) / max(1, last - first))
    share = 1 - t if options.schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    return peak * (final + (1 - final) * share)


def drawn(options: OptimizerOptions, steps: int, updates_per_step: int = 1) -> str:
    """Returns the learning rates of the steps of a stage as a line of bars, with the highest and the last one."""
    updates = steps * updates_per_step
    if not updates:
        return "no updates"
    rates = [learning_rate(options, steps, updates_per_step, update) for update in range(updates)]
    width = min(_WIDTH, updates)
    shown = [rates[round(place * (updates - 1) / max(1, width - 1))] for place in range(width)]
    bars = "".join(_BARS[round(rate / options.learning_rate * (len(_BARS) - 1))] for rate in shown)
    highest = rates.index(max(rates)) // updates_per_step + 1
    return f"{bars}  at most {max(rates):.3g} (step {highest}), {rates[-1]:.3g} in the last of {steps:,} steps"
