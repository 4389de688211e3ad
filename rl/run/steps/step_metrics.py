"""Computes the metrics of a step that none of its phases has: its time, rates and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl.accounting import memory
from rl.accounting.flops import rates

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout

PHASES = ("sync", "sample", "reward_models", "logprob", "reward", "update")
"""Phases of a step, named as in time/<phase>. The remainder is idle time."""


def step_metrics(metrics: Mapping[str, float], seconds: float, layout: Layout) -> dict[str, float]:
    """Returns time, rates and memory of a step that took `seconds`, from its other metrics."""
    idle = max(0.0, seconds - sum(metrics.get(f"time/{phase}", 0.0) for phase in PHASES))
    operations = metrics["perf/step_tflop"] * 1e12
    return (
        {"time/step": seconds, "time/idle": idle}
        | rates("step", operations, metrics["perf/step_tokens"], seconds, layout)
        | memory.metrics()
    )
