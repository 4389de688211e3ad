"""Settings with which a plan fits that does not, found by compiling the programs that were too large with each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.config.run import RunConfig
from rl.plan import changes
from rl.plan.changes import Change
from rl.plan.children import AT_A_TIME, Attempt, Costs, Target, attempted, estimated
from rl.plan.compiled import Report

ENOUGH = 3
MESHES = 8  # the nearest to that of the configuration
SEVERAL, LATER = 100, 1000  # in the order of levers


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


def suggestions(
    config: RunConfig, target: Target, reports: Sequence[Report], most: int
) -> list[tuple[Change, Attempt]]:
    """Up to three changes with which the programs fit that did not, of different kinds, and what was compiled; at most `most` are
    compiled, two at a time. What needs too much by its arguments alone is not, and what an estimate says will fit comes first."""
    failed = [each for each in reports if not target.fits(each)]
    names, levers = [each.name for each in failed], _levers(config, target)
    left, several = _candidates(config, target, failed, levers), False
    single = {
        each.lever: each.change for each in left if not each.change.results and "mesh.fsdp" not in each.change.settings
    }
    found: list[tuple[Change, Attempt]] = []
    while most > 0 and len(found) < ENOUGH:
        if not several and not any(each.needs <= target.memory and not each.change.results for each in left):
            # Each alone is not enough: several at once come before those that change results.
            several, both = True, _candidates(config, target, failed, [changes.together(list(single.values()))])
            left += [replace(each, lever=SEVERAL) for each in both]
        some = _next(left, target.memory, min(AT_A_TIME, most))
        if not some:
            break
        most -= len(some)
        for each, attempt in zip(some, attempted([each.config for each in some], target, names), strict=True):
            # What was enough needs no stronger step, what was not no weaker one.
            left = [
                other for other in left if other.lever != each.lever or (not attempt.fits and other.step > each.step)
            ]
            if attempt.fits:
                found.append((each.change, attempt))
    return found[:ENOUGH]


def _next(left: Sequence[Candidate], memory: float, most: int) -> list[Candidate]:
    """Of different levers, those that should fit first, by how little they change; then those that need least."""

    def order(each: Candidate) -> tuple:
        lever = each.lever + LATER * each.change.results
        return (0, lever, each.step) if each.needs <= memory else (1, each.needs, each.step)

    first: dict[int, Candidate] = {}
    for each in sorted((each for each in left if each.held <= memory), key=order):
        first.setdefault(each.lever, each)
    return list(first.values())[:most]


def _candidates(
    config: RunConfig, target: Target, failed: Sequence[Report], levers: list[list[Change]]
) -> list[Candidate]:
    """What makes the programs that failed smaller by the estimate, each step more than the one before."""
    names = [each.name for each in failed]
    steps = [(lever, step, change) for lever, each in enumerate(levers) for step, change in enumerate(each)]
    made = [
        (*numbers, change, made) for *numbers, change in steps if (made := change.of(config)) and changes.possible(made)
    ]
    base, *costs = estimated([config, *(each for *_, each in made)], target)
    if isinstance(base, str):
        return []
    corrections, found = corrected(base, failed), []
    least = dict.fromkeys(range(len(levers)), base.needs({}, names))
    for (lever, step, change, changed), cost in zip(made, costs, strict=True):
        if isinstance(cost, str) or not cost.programs.keys() >= set(names):
            continue
        if (needs := cost.needs({}, names)) < least[lever]:
            least[lever] = needs
            held = max(cost.programs[name][0] for name in names)
            found.append(Candidate(lever, step, change, changed, held, cost.needs(corrections, names)))
    return found


def _levers(config: RunConfig, target: Target) -> list[list[Change]]:
    others = sorted(
        changes.meshes(config, target.inside(config), changes.divisors(config)),
        key=lambda mesh: _distance(config, mesh),
    )
    return changes.levers(config, [mesh for mesh in others if _distance(config, mesh)][:MESHES])


def _distance(config: RunConfig, mesh: dict[str, int]) -> float:
    return sum(
        abs(math.log2(size / max(1, getattr(config.mesh, axis)))) for axis, size in mesh.items() if axis != "fsdp"
    )


def corrected(costs: Costs, reports: Sequence[Report]) -> dict[str, float]:
    """By program: temporaries that were found over those that were estimated."""
    found = {}
    for report in reports:
        held, temporaries, _ = costs.programs[report.name]
        if math.isfinite(report.needs):
            found[report.name] = max(0.0, report.needs - held) / max(1.0, temporaries)
    return found
