"""Child processes that compile or estimate: each may load a compiler for devices that are not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from rl.config.run import RunConfig
from rl.errors import DuetError, ResourceError
from rl.plan.compiled import GIB, Report
from rl.plan.slices import Topology
from rl.reporting import chips

CACHE = "~/.cache/duet-rl/plans"
AT_A_TIME = 2


@dataclass(frozen=True)
class Target:
    """What is planned for. `memory`: bytes that programs may take on a device, None where nobody says."""

    topology: Topology
    memory: float | None
    device: str
    count: int

    @property
    def chip(self) -> chips.Chip | None:
        return chips.of(self.device)

    @classmethod
    def of(cls, told: dict, topology: Topology, gib: float | None) -> Target:
        """From the first line of a child."""
        return cls(topology, gib * GIB if gib else told["memory"], told["device"], told["count"])

    def inside(self, config: RunConfig) -> int:
        """Devices of each slice, of which this configuration says how many there are."""
        sizes = config.mesh.dcn.model_dump().values() if config.mesh.dcn else ()
        return self.count // (self.topology.slices if -1 in sizes else math.prod(sizes))

    def fits(self, report: Report) -> bool:
        return self.memory is None or report.needs <= self.memory


@dataclass(frozen=True)
class Costs:
    """An estimate of rl/plan/estimate.py as it comes from another process: [held, temporaries, seconds] by program."""

    programs: dict[str, tuple[float, float, float]]

    @property
    def held(self) -> float:
        return max(held for held, _, _ in self.programs.values())

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.programs.values())

    def needs(self, corrections: dict[str, float], only: Sequence[str] | None = None) -> float:
        """The largest program's bytes, of all or those that `only` names, with temporaries times the correction of each."""
        each = {name: cost for name, cost in self.programs.items() if only is None or name in only}
        return max((held + corrections.get(name, 1.0) * more for name, (held, more, _) in each.items()), default=0.0)


def described(name: str, gib: float | None) -> Target:
    """Raises ConfigError for a topology that is none, ResourceError for one that cannot be described here."""
    topology = Topology.read(name)
    (told,) = _lines({"configs": []}, topology)
    return Target.of(told, topology, gib)


def begun(config: RunConfig, name: str, gib: float | None) -> tuple[Target, Iterator[Report]]:
    """(the target, the Report of each program as soon as it is there). Raises as `described`, and what the child raises."""
    topology = Topology.read(name)
    lines = _lines({"configs": [_plain(config)], "memory": gib and gib * GIB}, topology)
    return Target.of(next(lines), topology, gib), map(_report, lines)


def estimated(configs: Sequence[RunConfig], target: Target) -> list[Costs | str]:
    """For each configuration what it would need, or what is wrong with it."""
    if not configs:
        return []
    request = {"configs": [_plain(config) for config in configs], "memory": target.memory, "estimate": True}
    _, *found = _lines(request, target.topology)
    return [
        each["wrong"] if "wrong" in each else Costs({name: tuple(c) for name, c in each["costs"].items()})
        for each in found
    ]


@dataclass(frozen=True)
class Attempt:
    """A configuration that was compiled, up to its first program that does not fit. `wrong`: why it cannot be; None: it can."""

    reports: list[Report]
    fits: bool
    wrong: str | None = None

    @property
    def needs(self) -> float:
        return max((each.needs for each in self.reports), default=0.0)


def attempted(configs: Sequence[RunConfig], target: Target, only: Sequence[str] | None = None) -> list[Attempt]:
    """Compiles these configurations at the same time."""

    def one(config: RunConfig) -> Attempt:
        reports = []
        try:
            with closing(
                _lines({"configs": [_plain(config)], "memory": target.memory, "only": only}, target.topology)
            ) as lines:
                next(lines)
                for report in map(_report, lines):
                    reports.append(report)
                    if not target.fits(report):
                        return Attempt(reports, fits=False)
        except DuetError as error:
            return Attempt(reports, fits=False, wrong=str(error).splitlines()[0])
        return Attempt(reports, fits=True)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, configs))


def _report(told: dict) -> Report:
    return Report(**told | {"shape": tuple(told["shape"])})


def _plain(config: RunConfig) -> dict:
    return config.model_dump(mode="json")


def _lines(request: dict, topology: Topology) -> Iterator[dict]:
    """What the child says, line by line; it ends with the iterator."""
    request |= {"topology": topology.name, "cache": os.environ.get("DUET_PLAN_CACHE", CACHE)}
    command, environment = [sys.executable, "-m", "rl.plan.compiled"], os.environ | topology.environment
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Errors go into a file: a compiler that says much would wait for a pipe that is read only at the end.
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stderr=complaints, env=environment, **pipes) as child,
    ):
        try:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                told = _read(line)
                if told is None or told == {"done": True}:
                    continue
                if "error" in told:
                    raise next(kind for kind in DuetError.__subclasses__() if kind.exit_code == told["exit_code"])(
                        told["error"]
                    )
                yield told
        except GeneratorExit:
            child.kill()
            raise
        if child.wait():
            complaints.seek(0)
            said = complaints.read()[-2000:].strip()
            last = said.rpartition("\n")[2]
            raise ResourceError(f"the compiler for {topology.name} ended with {child.returncode}: {last}\n{said}")


def _read(line: str) -> dict | None:
    """A line of the child; what compilers print besides is None."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
