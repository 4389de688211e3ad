"""Where the groups of a step come from: the interface of a producer.

A step of a stage that trains on rollouts takes groups from its producer and trains on them:

    groups = producer.take(prompts_per_step)
    train(groups)

Neither side knows the other. What training needs of a group is in the group (rollout/types.py): the
prompt with its row of data, its prompt id, and trajectories whose tokens say who wrote them, with
which log-probability and by weights of which version.

choice.py lists the producers and chooses one for a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.errors import Fault
    from rl.stages.stage import StageKind


class Producer(ABC):
    """Makes the groups that the steps of a stage train on.

    A stage makes its producer once, when it is created: before its configuration is checked and
    before a model is built. The docstring of a producer says what it draws, with which weights and
    in which order. These may depend on the configuration, its state and the calls before, never on
    the clock: the same run draws the same groups, also after a kill.
    """

    calls_generator: bool = True
    """Whether `take` calls the generator. The run then lays out the weights for it, and a plan has
    the programs of the generator for each step; `Stage.programs` has the others."""
    on_policy: bool = True
    """Whether the current weights draw every token. If not, groups may be stale: the generator then
    computes no values of a critic, and checks of log-probabilities look at versions."""
    versions_of_this_run: bool = True
    """Whether the versions of tokens count the updates of this run. If not, all tokens are
    stale."""

    def __init__(self, stage: StageKind):
        self._stage = stage

    def faults(self) -> Iterator[Fault]:
        """Yields what is wrong with the configuration of the stage. It is quick, reads no files and
        does not import jax."""
        yield from ()

    def remarks(self) -> Iterator[str]:
        """Yields settings of the stage that have no effect with this producer."""
        yield from ()

    def check_files(self) -> None:
        """Raises DataError for files that it cannot take groups from. Called before a model is
        built, and for `rl-train --check`."""
        return

    @abstractmethod
    def take(self, count: int) -> Rollouts:
        """Returns the next `count` groups, of as many trajectories each as the stage says;
        their scores may be pending. In a run of several processes all of them call it, and
        get the same groups."""

    def state(self) -> dict[str, Any]:
        """Returns what later steps depend on, besides the counts in `Progress`, as values that JSON
        can hold. Checkpoints have it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; {} at the start of a stage. Raises ModelError for one
        that it cannot read."""
        return


class ProducerFilter(Producer):
    """A producer that takes its groups from another one. It adds its state to the state of that
    one."""

    def __init__(self, producer: Producer, stage: StageKind):
        super().__init__(stage)
        self._producer = producer
        self.calls_generator = producer.calls_generator
        self.on_policy = type(self).on_policy and producer.on_policy
        self.versions_of_this_run = producer.versions_of_this_run

    def faults(self) -> Iterator[Fault]:
        yield from self._producer.faults()

    def remarks(self) -> Iterator[str]:
        yield from self._producer.remarks()

    def check_files(self) -> None:
        self._producer.check_files()

    def state(self) -> dict[str, Any]:
        return self._producer.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._producer.restore(state)
