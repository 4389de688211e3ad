"""Tells a curriculum the rewards of the rows that it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl.stages.sampling.scored import split
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.sampling.producer import Producer
    from rl.stages.stage import StageKind


class Taught:
    """Hands on the groups of another producer, which draws rows by the curriculum of the stage.

    The rewards of a call are told before the next one and before the state of a checkpoint: they
    are then computed, so that nothing waits for them.
    """

    def __init__(self, producer: Producer, stage: StageKind):
        self._producer = producer
        self._stage = stage
        self._untold: Rollouts | None = None

    @property
    def generates(self) -> bool:
        """Whether the other producer does."""
        return self._producer.generates

    @property
    def on_policy(self) -> bool:
        """Whether the other producer is."""
        return self._producer.on_policy

    def check(self) -> None:
        self._producer.check()

    def take(self, count: int) -> Rollouts:
        """Returns the groups of the other producer."""
        self._tell()
        self._untold = self._producer.take(count)
        return self._untold

    def _tell(self) -> None:
        if self._untold is None:
            return
        groups = split(self._untold)
        rows = [each.group.row for each in groups if each.group.row is not None]
        self._untold = None
        assert self._stage.curriculum is not None and len(rows) == len(groups)
        self._stage.curriculum.told(rows, np.stack([each.total for each in groups]))

    def state(self) -> dict[str, Any]:
        """Returns the state of the other producer; `StageKind.producer_state` adds that of the
        curriculum, which knows all rewards now."""
        self._tell()
        return self._producer.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._producer.restore(state)
