"""What is wrong with the configuration of a stage that trains on rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rl.errors import Fault

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


def faults(stage: StageKind) -> Iterator[Fault]:
    """Yields the faults of rewards and sampling."""
    options = stage.options
    name = options.algorithm.name
    sampling = options.sampling
    if not stage.rewards:
        yield Fault(
            f"{name} needs rewards, here or for all stages (`rewards`)",
            key=(*stage.path, "rewards"),
        )
    if options.samples_per_prompt == 1 and (
        stage.algorithm.dynamic_batches or compares_groups(stage)
    ):
        yield Fault(
            f"{name} compares the completions of a prompt, and a single one teaches nothing; "
            "use 2 or more",
            key=(*stage.path, "samples_per_prompt"),
        )
    if sampling.temperature == 0:
        yield Fault(
            "0 is greedy: nothing to learn from equal completions",
            key=(*stage.path, "sampling", "temperature"),
        )
    if stage.max_kept and sampling.top_k > sampling.max_kept:
        yield Fault(
            f"{sampling.max_kept} ids of a token are recorded, but top_k leaves "
            f"{sampling.top_k}, and such "
            "a token leaves the loss; raise max_kept to at least top_k",
            key=(*stage.path, "sampling", "max_kept"),
        )


def compares_groups(stage: StageKind) -> bool:
    """Whether the algorithm learns from differences within groups alone: completions of a group
    with equal rewards have no advantage, and so has the only completion of a prompt."""
    algorithm = stage.algorithm
    G = stage.options.samples_per_prompt
    shape = (2, G, 1)
    # A penalty in the rewards differs between completions.
    known = {"token_kl": np.arange(2.0 * G).reshape(shape), "mask": np.ones(shape)}
    rewards_PG = np.repeat([[1.0], [0.0]], G, axis=1)
    try:
        takes = inspect.signature(algorithm.advantages).parameters
        arguments = {name: value for name, value in known.items() if name in takes}
        advantages = algorithm.advantages(rewards_PG, np.ones((2, G), int), **arguments)
    except (AttributeError, TypeError, ValueError):  # it needs a critic or greedy completions
        return False
    return not np.any(advantages)
