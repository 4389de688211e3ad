"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a filter over a producer, which leaves
out groups whose rewards have zero std, that is, are all equal, and takes others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.stages.producers.interface import Producer, ProducerFilter
from rl.stages.producers.scored import ScoredGroup, joined, of_same_rows, split
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


class DynamicSampling(ProducerFilter):
    """Takes groups of another producer and leaves out those whose rewards have zero std.

    It takes generation batches, each of as many groups as a step has, until enough groups have
    rewards that differ. It keeps their order. Groups beyond the need of a step are carried to the
    next one, which takes them first: older weights sampled them. Under `router_replay` they are
    dropped instead. The state in a checkpoint is `carried`.
    """

    # False even where nothing is carried, so that all steps have the same programs.
    on_policy = False

    def __init__(self, producer: Producer, stage: StageKind):
        super().__init__(producer, stage)
        self.carried: list[ScoredGroup] = []

    def take(self, count: int) -> Rollouts:
        """Returns `count` groups, after at most `dynamic_batches` generation batches. If that is
        not enough, groups with zero std fill the step: an advantage relative to the group is then
        0."""
        algorithm = self._stage.algorithm
        names = self._stage.runner.names
        reward = algorithm.dynamic_reward
        column = None if reward is None else names.index(reward)
        useful = list(self.carried)
        zero_std: list[ScoredGroup] = []
        batches: list[Rollouts] = []
        while len(useful) < count and len(batches) < algorithm.dynamic_batches:
            batch = self._producer.take(count)
            with self._stage.context.timeline.span("waiting for rewards") as span:
                groups = split(batch)
            batches.append(replace(batch, waiting=batch.waiting + span.seconds))
            for group in groups:
                (zero_std if group.has_zero_std(column) else useful).append(group)
        fillers = zero_std[: max(0, count - len(useful))]
        metrics = _metrics(batches, len(self.carried), left_out=len(zero_std), fillers=len(fillers))
        # Routes are large: a checkpoint does not hold them, so no groups are carried.
        self.carried = [] if self._stage.options.router_replay else useful[count:]
        result = joined(useful[:count] + fillers, batches, names)
        return replace(result, metrics={**result.metrics, **metrics})

    def state(self) -> dict[str, Any]:
        carried = [group.to_json() for group in self.carried]
        return {**super().state(), "carried": carried}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint. Groups whose row has another prompt now, or is gone, are
        left out: `run.changed_data` allowed other rows."""
        super().restore(state)
        carried = state.get("carried", [])
        self.carried = of_same_rows(carried, self._stage.rows)
        if left_out := len(carried) - len(self.carried):
            self._stage.context.events.note(
                f"{self._stage.name}: {left_out} groups of the step before are left out: the rows "
                "of their prompts have changed"
            )


def _metrics(
    batches: Sequence[Rollouts], carried: int, *, left_out: int, fillers: int
) -> dict[str, float]:
    """Returns the metrics of a step from its generation batches.

    carried: number of groups carried from the step before. left_out: number of groups of these
    batches with zero std. fillers: how many of them fill the step.
    """
    rewards = np.asarray([x for each in batches for x in each.scores.result().total])
    sampled = sum(len(each.groups) for each in batches)
    metrics = {
        "dynamic/batches": float(len(batches)),
        "dynamic/kept_share": 1.0 - left_out / sampled if sampled else 1.0,
        "dynamic/carried": float(carried),
        "dynamic/without_difference": float(fillers),
    }
    if np.isfinite(rewards).any():
        metrics["dynamic/reward_mean"] = float(np.nanmean(rewards))
    return metrics
