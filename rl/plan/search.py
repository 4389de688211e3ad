"""`rl plan --search`: chooses mesh, micro-batch and remat policy by an estimate, then compiles to
confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import rl.stages
from rl.config import yaml_tree
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.plan import changes
from rl.plan.changes import REMAT, SettingsChange
from rl.plan.children import AT_A_TIME, Costs, Target, Trial, attempted, estimated
from rl.plan.compiled import ProgramReport
from rl.plan.suggest import corrected
from rl.run.resume.continued import AUTO


@dataclass(frozen=True)
class MeshChoice:
    """A mesh with a micro-batch and a remat policy.

    size: (rows of a micro-batch, rank of the remat policy); larger numbers need more memory on the
    same mesh.
    """

    change: SettingsChange
    config: RunConfig
    costs: Costs
    size: tuple[int, int]

    @property
    def mesh(self) -> tuple:
        """Returns the sizes of the mesh axes."""
        return tuple(
            value for key, value in self.change.settings.items() if key.startswith("mesh.")
        )


@dataclass(frozen=True)
class SearchResult:
    """Compiled choices. looked_at: choices in all. pruned: choices whose resident bytes alone are
    too many. least: the fewest resident bytes of a choice."""

    tried: list[tuple[MeshChoice, Trial]]
    looked_at: int
    pruned: int
    least: float


def search(
    config: RunConfig, target: Target, most: int, tell: Callable[[str], None] = lambda text: None
) -> SearchResult:
    """Compiles at most `most` choices, two of different meshes at a time, the quickest by the
    estimate that should fit first, and says so by `tell`.

    Each compilation corrects the estimates of the others. After a choice that does not fit, no
    larger choice on the same mesh is tried. Raises ConfigError if the memory of a device is unknown
    or no mesh is possible.
    """
    memory = target.memory
    if memory is None:
        raise ConfigError(
            "--search: the memory of these devices is not known; give it in GiB with --memory"
        )
    everything = [
        (change, made, size)
        for change, size in _changes(config, target)
        if (made := change.of(config))
    ]
    costs = estimated([made for _, made, _ in everything], target)
    choices = {}
    for (change, made, size), cost in zip(everything, costs, strict=True):
        if isinstance(cost, Costs):  # settings with equal programs are one choice
            choices.setdefault(
                tuple(sorted(cost.programs.items())), MeshChoice(change, made, cost, size)
            )
    if not choices:
        raise ConfigError(
            f"--search: no mesh of {target.inside(config)} devices can be: "
            f"{next(iter(costs), 'none divides them')}"
        )
    left = [choice for choice in choices.values() if choice.costs.resident <= memory]
    pruned = len(choices) - len(left)
    tried = []
    corrections = {}

    def rank(choice: MeshChoice) -> tuple:
        needs = choice.costs.needs(corrections)
        return (0, choice.costs.seconds) if needs <= memory else (1, needs)

    while left and len(tried) < most:
        some: list[MeshChoice] = []
        for each in sorted(left, key=rank):
            if len(some) < min(AT_A_TIME, most - len(tried)) and each.mesh not in {
                other.mesh for other in some
            }:
                some += [each] if changes.possible(each.config) else []
        if not some:
            break
        for each in some:
            tell(f"{len(tried) + 1} of at most {most}: compiling with {each.change}")
        for choice, attempt in zip(
            some, attempted([choice.config for choice in some], target), strict=True
        ):
            tried.append((choice, attempt))
            corrections |= corrected(choice.costs, attempt.reports)
            left = [
                other
                for other in left
                if other is not choice and (attempt.fits or not _as_large(other, choice))
            ]
    return SearchResult(
        tried, len(choices), pruned, min(choice.costs.resident for choice in choices.values())
    )


def _as_large(other: MeshChoice, choice: MeshChoice) -> bool:
    return other.mesh == choice.mesh and all(
        a >= b for a, b in zip(other.size, choice.size, strict=True)
    )


def _changes(config: RunConfig, target: Target) -> Iterator[tuple[SettingsChange, tuple[int, int]]]:
    rows_of_stages = [stage.rows_per_update for stage in rl.stages.create(config)]
    parts = [2**n for n in range(max(rows_of_stages).bit_length())]
    own = config.model.remat
    policies = REMAT if own == AUTO or own in REMAT else (own, *REMAT)
    for mesh in changes.meshes(config, target.inside(config), changes.divisors(config)):
        for part in parts:
            rows = [-(-each // part) for each in rows_of_stages]
            for number, remat in enumerate(policies):
                settings: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
                settings["model.remat"] = remat
                if config.model.remat_tensors and remat != "custom":
                    settings["model.remat_tensors"] = {}
                settings |= {f"stages.{i}.micro_batch": each for i, each in enumerate(rows)}
                yield SettingsChange(settings), (max(rows), -number)


def as_yaml(change: SettingsChange) -> str:
    """Writes the settings as a YAML file that can be merged over the configuration."""
    tree: dict = {}
    for key, value in change.settings.items():
        *path, last = (int(part) if part.isdecimal() else part for part in key.split("."))
        node: Any = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return yaml_tree.dump(tree)


def best(
    tried: Sequence[tuple[MeshChoice, Trial]], seconds: Callable[[Sequence[ProgramReport]], float]
) -> list[tuple[MeshChoice, Trial]]:
    """Returns the choices that fit, the quickest first by `seconds(reports)`."""
    return sorted(
        (each for each in tried if each[1].fits), key=lambda each: seconds(each[1].reports)
    )
