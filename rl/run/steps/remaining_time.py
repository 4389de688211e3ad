"""Estimates the remaining time of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rl.run.steps.step_metrics import PHASES

STEADY_STEPS = (3, 5)
"""First and last step, from the start of the process, whose median time predicts the later ones.
None compiles."""


class RemainingTime:
    """Estimates the remaining time of a stage, once."""

    def __init__(self) -> None:
        self._steps: list[Mapping[str, float]] = []

    def after_step(self, metrics: Mapping[str, float], left: int) -> str | None:
        """Takes the metrics of a step. Returns the estimate for `left` more steps after the last of
        STEADY_STEPS."""
        first, last = STEADY_STEPS
        if len(self._steps) == last:  # estimated already
            return None
        self._steps.append(metrics)
        if len(self._steps) < last:
            return None
        steady = sorted(self._steps[first - 1 :], key=lambda each: each["time/step"])
        return _estimate(steady[(last - first) // 2], left)


def _estimate(metrics: Mapping[str, float], left: int) -> str:
    """Returns a line with the phases of a step's time, its rates, and the remaining time for `left`
    steps."""
    seconds = metrics["time/step"]
    shares = {name: metrics.get(f"time/{name}", 0.0) / seconds for name in PHASES}
    shown = ", ".join(
        f"{name} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.01
    )
    utilisation = (
        f", {metrics['perf/mfu_step']:.0%} of the devices' rate"
        if "perf/mfu_step" in metrics
        else ""
    )
    tokens = metrics["perf/step_tokens_per_s"]
    operations = metrics["perf/step_tflops_per_s"] * 1000
    rate = f"{tokens:,.0f} tokens/s and {operations:,.1f} GFLOP/s per device{utilisation}"
    remaining = timedelta(seconds=round(left * seconds))
    return f"a step takes {seconds:.2g} s ({shown}; {rate}); {left} more: about {remaining}"
