"""Where the groups of a step come from: the interface of a producer.

A step of a stage that samples takes groups from its producer and trains on them:

    groups = producer.take(prompts_per_step)
    train(groups)

Neither side knows the other. What training needs of a group is in the group (rollout/types.py): the
prompt with its row of data, its prompt id, and trajectories whose tokens say who wrote them, with
which log-probability and by weights of which version.

Two producers make groups: `Synchronous` samples them with the current weights, `Recorded` reads
those of an earlier run. Two stand over another one: `Taught` tells a curriculum the rewards of all
its groups, `DynamicSampling` leaves out groups with equal rewards. `Stage.create_producer` of
rl/stages/online.py chooses; the order is DynamicSampling(Taught(Synchronous)).
"""

from __future__ import annotations

from typing import Any, Protocol

from rollout.collect import Rollouts


class Producer(Protocol):
    """Makes the groups that the steps of a stage train on.

    The docstring of a producer says what it draws, with which weights and in which order. These may
    depend on the configuration, its state and the calls before, never on the clock: the same run
    draws the same groups, also after a kill.
    """

    @property
    def generates(self) -> bool:
        """Whether `take` calls the generator. The run then lays out the weights for it, and a plan
        has the programs of the generator for each step; `Stage.programs` has the others."""
        ...

    @property
    def on_policy(self) -> bool:
        """Whether the current weights draw every token. If not, groups may be stale: the generator
        then computes no values of a critic, and checks of log-probabilities look at versions."""
        ...

    def check(self) -> None:
        """Raises DataError for files that it cannot take groups from. Called before a model is
        built, and for `rl-train --check`."""
        ...

    def take(self, count: int) -> Rollouts:
        """Returns the next `count` groups, of as many trajectories each as the stage says;
        their scores may still be computed. In a run of several processes all of them call it, and
        get the same groups."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns what later steps depend on, besides the counts in `Progress`, as values that JSON
        can hold. Checkpoints have it. A filter over a producer adds to the state of that one."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; {} at the start of a stage. Raises ModelError for one
        that it cannot read."""
        ...
