"""Suggests settings with which a plan fits, by compiling the programs that were too large with
candidate settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl.config.run import RunConfig
from rl.plan import changes
from rl.plan.changes import SettingsChange
from rl.plan.children import AT_A_TIME, Costs, Target, Trial, attempted, estimated
from rl.plan.compiled import ProgramReport

ENOUGH = 3
MESHES = 8  # tries the meshes nearest to the configured one
SEVERAL, LATER = 100, 1000  # offsets in the order of knobs: several at once, changed results


@dataclass(frozen=True)
class Candidate:
    """One value of a knob. A smaller knob or step changes less.

    resident: bytes per device that the run keeps, exact. needs: these and the estimated
    temporaries.
    """

    knob: int
    step: int
    change: SettingsChange
    config: RunConfig
    resident: float
    needs: float


@dataclass(frozen=True)
class Suggestions:
    """Settings for programs that do not fit.

    fitting: up to three changes of different kinds with which they fit, with their compilations.
    strongest: the two settings that save most by the estimate. needs: bytes of the largest program
    by the same estimate.
    """

    fitting: list[tuple[SettingsChange, Trial]]
    strongest: list[Candidate]
    needs: float


def suggestions(
    config: RunConfig,
    target: Target,
    reports: Sequence[ProgramReport],
    most: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Suggestions:
    """Looks for settings with which the failed programs fit.

    Compiles at most `most` changes, two at a time, and says so by `tell`. Skips a change whose
    resident bytes alone are too many. Starts with changes that fit by the estimate.
    """
    memory = target.memory
    assert memory is not None  # with unknown memory every program fits
    failed = [each for each in reports if not target.fits(each)]
    names = [each.name for each in failed]
    knobs = _knobs(config, target)
    tell("estimating other settings")
    needs, left = _candidates(config, target, failed, knobs)
    strongest = _strongest(left)
    several = False
    single = {
        each.knob: each.change
        for each in left
        if not each.change.results and "mesh.fsdp" not in each.change.settings
    }
    fitting: list[tuple[SettingsChange, Trial]] = []
    while most > 0 and len(fitting) < ENOUGH:
        if not several and not any(
            each.needs <= memory and not each.change.results for each in left
        ):
            # No single change is enough: combinations come before changes of results.
            several = True
            _, both = _candidates(config, target, failed, [changes.together(list(single.values()))])
            left += [replace(each, knob=SEVERAL) for each in both]
        some = _next(left, memory, min(AT_A_TIME, most))
        if not some:
            break
        most -= len(some)
        for each in some:
            tell(f"compiling with {each.change}")
        for each, attempt in zip(
            some, attempted([each.config for each in some], target, names), strict=True
        ):
            # After a step that fits, skip stronger steps of its knob; otherwise skip weaker ones.
            left = [
                other
                for other in left
                if other.knob != each.knob or (not attempt.fits and other.step > each.step)
            ]
            if attempt.fits:
                fitting.append((each.change, attempt))
    return Suggestions(fitting[:ENOUGH], strongest, needs)


def _strongest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates of two knobs that need least, the one that needs less first."""
    least: dict[int, Candidate] = {}
    for each in sorted(candidates, key=lambda each: each.needs):
        least.setdefault(each.knob, each)
    return list(least.values())[:2]


def _next(left: Sequence[Candidate], memory: float, most: int) -> list[Candidate]:
    """Returns the best candidate of each knob: first those that should fit, smallest change first,
    then by needs."""

    def order(each: Candidate) -> tuple:
        knob = each.knob + LATER * each.change.results
        return (0, knob, each.step) if each.needs <= memory else (1, each.needs, each.step)

    first: dict[int, Candidate] = {}
    for each in sorted((each for each in left if each.resident <= memory), key=order):
        first.setdefault(each.knob, each)
    return list(first.values())[:most]


def _candidates(
    config: RunConfig,
    target: Target,
    failed: Sequence[ProgramReport],
    knobs: list[list[SettingsChange]],
) -> tuple[float, list[Candidate]]:
    """Returns the estimated bytes of the failed programs, and candidates that reduce them, each
    step of a knob more than the last."""
    names = [each.name for each in failed]
    steps = [
        (knob, step, change) for knob, each in enumerate(knobs) for step, change in enumerate(each)
    ]
    made = [
        (*numbers, change, made)
        for *numbers, change in steps
        if (made := change.of(config)) and changes.possible(made)
    ]
    base, *costs = estimated([config, *(each for *_, each in made)], target)
    if isinstance(base, str):
        return math.inf, []
    corrections = corrected(base, failed)
    candidates = []
    least = dict.fromkeys(range(len(knobs)), base.needs({}, names))
    for (knob, step, change, changed), cost in zip(made, costs, strict=True):
        if isinstance(cost, str) or not cost.programs.keys() >= set(names):
            continue
        if (needs := cost.needs({}, names)) < least[knob]:
            least[knob] = needs
            resident = max(cost.programs[name][0] for name in names)
            candidates.append(
                Candidate(knob, step, change, changed, resident, cost.needs(corrections, names))
            )
    return base.needs(corrections, names), candidates


def _knobs(config: RunConfig, target: Target) -> list[list[SettingsChange]]:
    others = sorted(
        changes.meshes(config, target.inside(config), changes.divisors(config)),
        key=lambda mesh: _distance(config, mesh),
    )
    return changes.knobs(config, [mesh for mesh in others if _distance(config, mesh)][:MESHES])


def _distance(config: RunConfig, mesh: dict[str, int]) -> float:
    return sum(
        abs(math.log2(size / max(1, getattr(config.mesh, axis))))
        for axis, size in mesh.items()
        if axis != "fsdp"
    )


def corrected(costs: Costs, reports: Sequence[ProgramReport]) -> dict[str, float]:
    """Returns, by program, measured over estimated temporaries."""
    factors = {}
    for report in reports:
        resident, temporaries, _ = costs.programs[report.name]
        if math.isfinite(report.needs):
            factors[report.name] = max(0.0, report.needs - resident) / max(1.0, temporaries)
    return factors
