"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a filter over a producer, which leaves
out groups whose rewards are all equal and takes others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.stages.sampling.scored import ScoredGroup, joined, of_same_rows, split
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.sampling.producer import Producer
    from rl.stages.stage import StageKind


class DynamicSampling:
    """Takes groups of another producer and leaves out those whose rewards are equal.

    It keeps their order. Groups beyond the need of a step are carried over to the next one, which
    takes them first: older weights sampled them. The state in a checkpoint is `carried`.
    """

    # False even where nothing is carried over, so that all steps have the same programs.
    on_policy = False

    def __init__(self, producer: Producer, stage: StageKind):
        self._producer = producer
        self._stage = stage
        self.carried: list[ScoredGroup] = []

    @property
    def generates(self) -> bool:
        """Whether the other producer does."""
        return self._producer.generates

    def check(self) -> None:
        self._producer.check()

    def take(self, count: int) -> Rollouts:
        """Returns `count` groups, after at most `dynamic_batches` batches of the other producer. If
        that is not enough, groups that were left out fill the step: where all rewards are equal, an
        advantage relative to the group is 0."""
        algorithm = self._stage.algorithm
        reward = algorithm.dynamic_reward
        column = None if reward is None else self._stage.runner.names.index(reward)
        kept = list(self.carried)
        dropped = []
        taken = []
        while len(kept) < count and len(taken) < algorithm.dynamic_batches:
            rollouts = self._producer.take(count)
            taken.append(rollouts)
            for group in split(rollouts):
                (kept if group.differs(column) else dropped).append(group)
        groups = kept[:count] + dropped[: max(0, count - len(kept))]
        totals = np.asarray([x for each in taken for x in each.scores.result().total])
        tried = sum(len(rollouts.groups) for rollouts in taken)
        metrics = {
            "dynamic/batches": float(len(taken)),
            "dynamic/kept_share": 1.0 - len(dropped) / tried if tried else 1.0,
            "dynamic/carried": float(len(self.carried)),
            "dynamic/without_difference": float(max(0, count - len(kept))),
        }
        if np.isfinite(totals).any():
            metrics["dynamic/reward_mean"] = float(np.nanmean(totals))
        # Routes are large: a checkpoint does not hold them, so groups that are left over are
        # dropped.
        self.carried = [] if self._stage.options.router_replay else kept[count:]
        result = joined(groups, taken, self._stage.runner.names)
        return replace(result, metrics={**result.metrics, **metrics})

    def state(self) -> dict[str, Any]:
        carried = [group.to_json() for group in self.carried]
        return {**self._producer.state(), "carried": carried}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint. Groups whose row has another prompt now, or is gone, are
        left out: `run.changed_data` allowed other rows."""
        self._producer.restore(state)
        carried = state.get("carried", [])
        self.carried = of_same_rows(carried, self._stage.rows)
        if left_out := len(carried) - len(self.carried):
            self._stage.context.events.note(
                f"{self._stage.name}: {left_out} groups of the step before are left out: the rows "
                "of their prompts have changed"
            )
