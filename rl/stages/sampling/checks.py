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
        yield from _without_rewards(stage)
    has_reference = "ref_logp" in stage.inputs or (
        stage.teacher is not None and stage.teacher.source == "reference"
    )
    if stage.algorithm.reference_every and not has_reference:
        yield Fault(
            "there is no reference model: set kl_coef, or teacher.source: reference",
            key=(*stage.path, "algorithm", "reference_every"),
        )
    yield from _success_faults(stage)
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


def _without_rewards(stage: StageKind) -> Iterator[Fault]:
    """Yields what a stage without rewards needs them for."""
    where = "here or for all stages (`rewards`)"
    if stage.algorithm.needs_rewards:
        yield Fault(
            f"{stage.options.algorithm.name} needs rewards, {where}", key=(*stage.path, "rewards")
        )
        return
    choosers = {
        ("algorithm", "dynamic_batches"): stage.algorithm.dynamic_batches,
        ("curriculum",): stage.options.curriculum,
    }
    for key, value in choosers.items():
        if value:
            yield Fault(
                f"chooses by rewards; set them, {where}, or leave it out", key=(*stage.path, *key)
            )


def _success_faults(stage: StageKind) -> Iterator[Fault]:
    """Yields what a teacher lacks whose prompt shows another completion of the group."""
    if stage.teacher is None or "{success}" not in (stage.teacher.prompt or ""):
        return
    path = (*stage.path, "teacher") if stage.options.teacher else ("teacher",)
    if not stage.rewards:
        yield Fault("{success} is told by rewards: set `rewards`", key=(*path, "prompt"))
    if stage.options.samples_per_prompt == 1:
        yield Fault(
            "{success} is another completion of the prompt; use 2 or more",
            key=(*stage.path, "samples_per_prompt"),
        )


def compares_groups(stage: StageKind) -> bool:
    """Whether the algorithm learns from differences within groups alone: completions of a group
    with equal rewards have no advantage, and so has the only completion of a prompt."""
    algorithm = stage.algorithm
    if not algorithm.needs_rewards:
        return False
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
