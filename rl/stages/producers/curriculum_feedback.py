"""Has a curriculum observe the rewards of the rows that it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl.stages.producers.interface import Producer, ProducerFilter
from rl.stages.producers.scored import split
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


class CurriculumFeedback(ProducerFilter):
    """Hands on the groups of another producer, which draws rows by the curriculum of the stage.

    The curriculum observes the rewards of a call at the next call, or when a checkpoint asks for
    the state. The step has waited for them by then.
    """

    def __init__(self, producer: Producer, stage: StageKind):
        super().__init__(producer, stage)
        self._unobserved: Rollouts | None = None

    def take(self, count: int) -> Rollouts:
        """Returns the groups of the other producer."""
        self._observe()
        self._unobserved = self._producer.take(count)
        return self._unobserved

    def _observe(self) -> None:
        if self._unobserved is None:
            return
        groups = split(self._unobserved)
        rows = [each.group.row for each in groups if each.group.row is not None]
        self._unobserved = None
        assert self._stage.curriculum is not None and len(rows) == len(groups)
        self._stage.curriculum.observe(rows, np.stack([each.total for each in groups]))

    def state(self) -> dict[str, Any]:
        """Returns the state of the other producer; `StageKind.producer_state` adds that of the
        curriculum, which has observed all rewards now."""
        self._observe()
        return super().state()

    def restore(self, state: dict[str, Any]) -> None:
        self._unobserved = None
        super().restore(state)
