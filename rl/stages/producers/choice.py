"""The producer of a stage, as its configuration names it.

Synchronous          samples groups with the current weights
Recorded             reads groups of an earlier run (`rollouts`)

CurriculumFeedback   a filter: has a curriculum observe the rewards of all groups (`curriculum`)
DynamicSampling      a filter: leaves out groups whose rewards have zero std (`dynamic_batches`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.stages.producers.curriculum_feedback import CurriculumFeedback
from rl.stages.producers.dynamic import DynamicSampling
from rl.stages.producers.interface import Producer
from rl.stages.producers.recorded import Recorded
from rl.stages.producers.synchronous import Synchronous

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


def create(stage: StageKind) -> Producer:
    """Returns what makes the groups of the steps of a stage."""
    options = stage.options
    if options.rollouts is not None:
        return Recorded(stage, options.rollouts)
    producer: Producer = Synchronous(stage)
    if options.curriculum is not None:
        producer = CurriculumFeedback(producer, stage)
    if stage.algorithm.dynamic_batches:
        producer = DynamicSampling(producer, stage)
    return producer
