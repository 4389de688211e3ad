"""Settings with which a plan fits that does not, found by compiling the programs that were too large with each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.config import RunConfig
from rl.plan import changes
from rl.plan.changes import Change
from rl.plan.children import AT_A_TIME, Attempt, Costs, Target, attempted, estimated
from rl.plan.compiled import Report

ENOUGH = 3
MESHES = 8  # the nearest to that of the configuration


@dataclass(frozen=True)
class Candidate:
    """A step of a lever: the smaller both numbers, the less it changes. `held`: bytes of arguments and what lies beside them;
    `needs`: with temporaries, as estimated."""

    lever: int
    step: int
    change: Change
    config: RunConfig
    held: float
    needs: float

    def order(self, memory: float) -> tuple:
        return (0, self.lever, self.step) if self.needs <= memory else (1, self.needs, self.step)


def suggestions(config: RunConfig, target: Target, reports: Sequence[Report], most: int) -> list[tuple[Change, Attempt]]:
    """Up to three changes with which the programs fit that did not, of different kinds, and what was compiled; at most `most` are
    compiled, two at a time. What needs too much by its arguments alone is not, and what an estimate says will fit comes first."""
    failed = [each for each in reports if not target.fits(each)]
    names = [each.name for each in failed]
    left = [each for each in _candidates(config, target, failed) if each.held <= target.memory]
    found: list[tuple[Change, Attempt]] = []
    while left and len(found) < ENOUGH and most > 0:
        some: list[Candidate] = []
        for each in sorted(left, key=lambda candidate: candidate.order(target.memory)):
            if each.lever not in {other.lever for other in some} and len(some) < min(AT_A_TIME, most):
                some.append(each)
        most -= len(some)
        for each, attempt in zip(some, attempted([each.config for each in some], target, names), strict=True):
            # What was enough needs no stronger step, what was not no weaker one.
            left = [other for other in left if other.lever != each.lever or (not attempt.fits and other.step > each.step)]
            if attempt.fits:
                found.append((each.change, attempt))
    return found[:ENOUGH]


def _candidates(config: RunConfig, target: Target, failed: Sequence[Report]) -> list[Candidate]:
    """What makes the programs that failed smaller by the estimate, each step more than the one before; several settings at once
    come after those that leave results as they are, before those that do not."""
    (base,) = estimated([config], target)
    if isinstance(base, str):
        return []
    others = sorted(changes.meshes(config, target.count, changes.divisors(config)), key=lambda mesh: _distance(config, mesh))
    levers = changes.levers(config, [mesh for mesh in others if _distance(config, mesh)][:MESHES])
    found = _measured(config, target, (base, failed), levers)
    useful = {each.lever: each.change for each in found if not each.change.results and "mesh.fsdp" not in each.change.settings}
    both = _measured(config, target, (base, failed), [changes.together(list(useful.values()))])
    calm = [each for each in found if not each.change.results]
    both = [replace(each, lever=len(levers)) for each in both]
    return [*calm, *both, *(replace(each, lever=len(levers) + 1 + each.lever) for each in found if each.change.results)]


def _measured(
    config: RunConfig, target: Target, failed: tuple[Costs, Sequence[Report]], levers: list[list[Change]]
) -> list[Candidate]:
    base, reports = failed
    names, corrections = [each.name for each in reports], corrected(base, reports)
    steps = [(lever, step, change) for lever, each in enumerate(levers) for step, change in enumerate(each)]
    possible = [(*numbers, change, made) for *numbers, change in steps if (made := change.of(config)) and changes.possible(made)]
    least, found = dict.fromkeys(range(len(levers)), base.needs({}, names)), []
    for (lever, step, change, made), cost in zip(possible, estimated([made for *_, made in possible], target), strict=True):
        if isinstance(cost, str) or not cost.programs.keys() >= set(names):
            continue
        if (needs := cost.needs({}, names)) < least[lever]:
            least[lever] = needs
            held = max(cost.programs[name][0] for name in names)
            found.append(Candidate(lever, step, change, made, held, cost.needs(corrections, names)))
    return found


def _distance(config: RunConfig, mesh: dict[str, int]) -> float:
    return sum(abs(math.log2(size / max(1, getattr(config.mesh, axis)))) for axis, size in mesh.items() if axis != "fsdp")


def corrected(costs: Costs, reports: Sequence[Report]) -> dict[str, float]:
    """By program: temporaries that were found over those that were estimated."""
    found = {}
    for report in reports:
        held, temporaries, _ = costs.programs[report.name]
        if math.isfinite(report.needs):
            found[report.name] = max(0.0, report.needs - held) / max(1.0, temporaries)
    return found
