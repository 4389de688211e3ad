"""`rl plan --search`: mesh, micro-batch and remat policy for a slice, chosen by an estimate and confirmed by compiling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rl.stages
from rl.config import yaml_tree
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.plan import changes
from rl.plan.changes import REMAT, Change
from rl.plan.children import AT_A_TIME, Attempt, Costs, Target, attempted, estimated
from rl.plan.suggest import corrected


@dataclass(frozen=True)
class Choice:
    """`size`: how the memory of two choices of one mesh compares, (rows of a micro-batch, what remat keeps)."""

    change: Change
    config: RunConfig
    costs: Costs
    size: tuple[int, int]

    @property
    def mesh(self) -> tuple:
        return tuple(value for key, value in self.change.settings.items() if key.startswith("mesh."))


@dataclass(frozen=True)
class Found:
    """What was compiled of `looked_at` choices, of which `pruned` need too much by their arguments alone."""

    tried: list[tuple[Choice, Attempt]]
    looked_at: int
    pruned: int


def search(config: RunConfig, target: Target, most: int) -> Found:
    """Compiles at most `most` choices, two of different meshes at a time: those that the estimate finds quickest among those that
    should fit. What was compiled corrects the estimate of what is left, and where it does not fit nothing larger on the same mesh
    is tried.

    Raises ConfigError where the memory of a device is not known, or no mesh can be.
    """
    if target.memory is None:
        raise ConfigError("--search: the memory of these devices is not known; give it in GiB with --memory")
    everything = [(change, made, size) for change, size in _changes(config, target) if (made := change.of(config))]
    costs = estimated([made for _, made, _ in everything], target)
    choices = {}
    for (change, made, size), cost in zip(everything, costs, strict=True):
        if isinstance(cost, Costs):  # settings that come to the same programs are one choice
            choices.setdefault(tuple(sorted(cost.programs.items())), Choice(change, made, cost, size))
    if not choices:
        raise ConfigError(
            f"--search: no mesh of {target.inside(config)} devices can be: {next(iter(costs), 'none divides them')}"
        )
    left = [choice for choice in choices.values() if choice.costs.held <= target.memory]
    pruned, tried, corrections = len(choices) - len(left), [], {}

    def rank(choice: Choice) -> tuple:
        needs = choice.costs.needs(corrections)
        return (0, choice.costs.seconds) if needs <= target.memory else (1, needs)

    while left and len(tried) < most:
        some: list[Choice] = []
        for each in sorted(left, key=rank):
            if len(some) < min(AT_A_TIME, most - len(tried)) and each.mesh not in {other.mesh for other in some}:
                some += [each] if changes.possible(each.config) else []
        if not some:
            break
        for choice, attempt in zip(some, attempted([choice.config for choice in some], target), strict=True):
            tried.append((choice, attempt))
            corrections |= corrected(choice.costs, attempt.reports)
            left = [other for other in left if other is not choice and (attempt.fits or not _as_large(other, choice))]
    return Found(tried, len(choices), pruned)


def _as_large(other: Choice, choice: Choice) -> bool:
    return other.mesh == choice.mesh and all(a >= b for a, b in zip(other.size, choice.size, strict=True))


def _changes(config: RunConfig, target: Target) -> Iterator[tuple[Change, tuple[int, int]]]:
    whole = [stage.rows_per_update for stage in rl.stages.create(config)]
    parts = [2**n for n in range(max(whole).bit_length())]
    policies = REMAT if config.model.remat in REMAT else (config.model.remat, *REMAT)
    for mesh in changes.meshes(config, target.inside(config), changes.divisors(config)):
        for part in parts:
            rows = [-(-each // part) for each in whole]
            for number, remat in enumerate(policies):
                settings = {f"mesh.{axis}": size for axis, size in mesh.items()} | {"model.remat": remat}
                if config.model.remat_tensors and remat != "custom":
                    settings["model.remat_tensors"] = {}
                settings |= {f"stages.{i}.micro_batch": each for i, each in enumerate(rows)}
                yield Change(settings), (max(rows), -number)


def as_yaml(change: Change) -> str:
    """The settings as a file that is laid over the configuration."""
    tree: dict = {}
    for key, value in change.settings.items():
        *path, last = (int(part) if part.isdecimal() else part for part in key.split("."))
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return yaml_tree.dump(tree)


def best(found: Sequence[tuple[Choice, Attempt]], seconds) -> list[tuple[Choice, Attempt]]:
    """Those that fit, the quickest first by `seconds(reports)`."""
    return sorted((each for each in found if each[1].fits), key=lambda each: seconds(each[1].reports))
