"""Whether a metric ends a stage before its last step."""

from __future__ import annotations

from collections.abc import Mapping

from policy.mesh import processes
from rl.config.stage import UntilOptions


def is_reached(until: UntilOptions | None, metrics: Mapping[str, float]) -> bool:
    """Returns whether the metrics of a step reach the bound of `until`; False without `until` and
    without its metric."""
    if until is None:
        return False
    value = first_process_value(metrics, until.metric)
    if value is None:
        return False
    above = until.at_least is not None and value >= until.at_least
    below = until.at_most is not None and value <= until.at_most
    return bool(above or below)


def first_process_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Returns a metric of a step as the first process has it; None: it has none. It may be absent
    on a process or differ there (time, a server, random numbers), so the first one decides for
    all."""
    value = metrics.get(name)
    return processes.broadcast(None if value is None else float(value))
