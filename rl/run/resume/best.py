"""The best step of a stage by a metric (`stages.N.best`), whose checkpoint stays on the disk. Free
of jax."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from rl.config.stage import BestOptions

KEY = "best"
"""Key of the best step in the host.json of a checkpoint."""


class BestStep(NamedTuple):
    """number: of its checkpoint. step: of the stage. value: of the metric."""

    number: int
    step: int
    value: float


class BestSteps:
    """The best steps of a stage so far, each better than the one before it. Only the last two are
    kept: the second last is the best one if the checkpoint of the last cannot be written."""

    def __init__(self, options: BestOptions | None, host: dict | None):
        """host: the host.json of the checkpoint that the stage goes on from; None: it starts."""
        self.options = options
        saved = None if host is None else host.get(KEY)
        self._steps: list[BestStep] = (
            [] if options is None or saved is None else [BestStep(**saved)]
        )

    @property
    def newest(self) -> BestStep | None:
        """Returns the best step so far; of equal ones, the first."""
        return self._steps[-1] if self._steps else None

    def keep(self, numbers: Collection[int]) -> None:
        """Drops the steps whose checkpoints are not on the disk. numbers: those that are."""
        self._steps = [each for each in self._steps if each.number in numbers]

    def improved(self, number: int, step: int, value: float | None) -> bool:
        """Returns whether a step is the best so far. One without the metric (None) or with one that
        is not finite never is."""
        if self.options is None or value is None or not math.isfinite(value):
            return False
        sign = 1 if self.options.mode == "max" else -1
        if self.newest is not None and sign * value <= sign * self.newest.value:
            return False
        self._steps = [*self._steps[-1:], BestStep(number, step, value)]
        return True

    def to_host(self) -> dict[str, object]:
        """Returns what the host.json of a checkpoint holds of them."""
        return {} if self.newest is None else {KEY: self.newest._asdict()}


def named_by(host: dict) -> Iterable[int]:
    """Returns the numbers of the checkpoints that a checkpoint with this host.json needs, besides
    itself."""
    return [host[KEY]["number"]] if KEY in host else []
