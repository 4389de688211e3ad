"""Starts child processes that compile or estimate; each may load a compiler for devices that are
not present."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rl.accounting import chips
from rl.config.run import RunConfig
from rl.errors import DuetError, ResourceError
from rl.plan.compiled import GIB, ProgramReport
from rl.plan.slices import Topology
from rl.run.resume.continued import AUTO, with_model_keys

CACHE = "~/.cache/duet-rl/plans"
AT_A_TIME = 2


@dataclass(frozen=True)
class Target:
    """The devices of a plan. memory: bytes per device that programs may use; None: unknown. count:
    of devices. kept_logits_mib: what a run would choose there for this key of `model`."""

    topology: Topology
    memory: float | None
    device: str
    count: int
    kept_logits_mib: int = 0

    @property
    def chip(self) -> chips.Chip | None:
        """Returns the rates of the chip; None if they are unknown."""
        return chips.of(self.device)

    @classmethod
    def of(cls, told: dict, topology: Topology, gib: float | None) -> Target:
        """Makes a target from the first line of a child. gib: memory of a device in place of the
        child's."""
        memory = gib * GIB if gib else told["memory"]
        return cls(topology, memory, told["device"], told["count"], told["kept_logits_mib"])

    def inside(self, config: RunConfig) -> int:
        """Returns the number of devices per slice; the configuration says how many slices there
        are."""
        sizes = config.mesh.dcn.model_dump().values() if config.mesh.dcn else ()
        return self.count // (self.topology.slices if -1 in sizes else math.prod(sizes))

    def fits(self, report: ProgramReport) -> bool:
        """Returns whether a device has enough memory for a program."""
        return self.memory is None or report.needs <= self.memory


@dataclass(frozen=True)
class Costs:
    """An estimate of rl/plan/estimate.py from another process: (resident, temporaries, seconds) by
    program."""

    programs: dict[str, tuple[float, float, float]]

    @property
    def resident(self) -> float:
        """Returns the bytes per device that the run keeps for the largest program."""
        return max(resident for resident, _, _ in self.programs.values())

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step."""
        return sum(seconds for _, _, seconds in self.programs.values())

    def needs(self, corrections: dict[str, float], only: Sequence[str] | None = None) -> float:
        """Returns the bytes of the largest program. `only` selects programs; a correction scales
        temporaries."""
        each = {name: cost for name, cost in self.programs.items() if only is None or name in only}
        sizes = (
            resident + corrections.get(name, 1.0) * more
            for name, (resident, more, _) in each.items()
        )
        return max(sizes, default=0.0)


def describe_target(name: str, gib: float | None) -> Target:
    """Describes a topology. Raises ConfigError for an unknown one, ResourceError if this machine
    cannot describe it."""
    topology = Topology.read(name)
    (told,) = _lines({"configs": []}, topology)
    return Target.of(told, topology, gib)


def with_chosen_remat(
    config: RunConfig, name: str, gib: float | None
) -> tuple[RunConfig, str | None]:
    """Returns (the configuration with the policy that `model.remat: auto` takes on a topology, what
    to say of it). Raises as `describe_target`, and the errors of the child."""
    if config.model.remat != AUTO:
        return config, None
    topology = Topology.read(name)
    request = {"configs": [_plain(config)], "memory": gib and gib * GIB, "remat": True}
    _, told = _lines(request, topology)
    return with_model_keys(config, remat=told["remat"]), told["note"]


def start_compiling(
    config: RunConfig, name: str, gib: float | None
) -> tuple[Target, Iterator[ProgramReport]]:
    """Returns (target, reports of programs in the order in which they are compiled).

    Raises as `describe_target`, and the errors of the child.
    """
    topology = Topology.read(name)
    lines = _lines({"configs": [_plain(config)], "memory": gib and gib * GIB}, topology)
    return Target.of(next(lines), topology, gib), map(_report, lines)


def estimated(configs: Sequence[RunConfig], target: Target) -> list[Costs | str]:
    """Returns, for each configuration, its estimated costs or a text that says why it cannot
    run."""
    if not configs:
        return []
    request = {
        "configs": [_plain(config) for config in configs],
        "memory": target.memory,
        "estimate": True,
    }
    _, *lines = _lines(request, target.topology)
    return [
        each["wrong"]
        if "wrong" in each
        else Costs({name: tuple(c) for name, c in each["costs"].items()})
        for each in lines
    ]


@dataclass(frozen=True)
class Trial:
    """A configuration compiled up to the first program that does not fit. wrong: why it cannot run;
    None: it can."""

    reports: list[ProgramReport]
    fits: bool
    wrong: str | None = None

    @property
    def needs(self) -> float:
        """Returns the bytes in use on a device while the largest program runs."""
        return max((each.needs for each in self.reports), default=0.0)


def attempted(
    configs: Sequence[RunConfig], target: Target, only: Sequence[str] | None = None
) -> list[Trial]:
    """Compiles these configurations in parallel. `only` selects programs by name."""

    def one(config: RunConfig) -> Trial:
        reports = []
        try:
            with closing(
                _lines(
                    {"configs": [_plain(config)], "memory": target.memory, "only": only},
                    target.topology,
                )
            ) as lines:
                next(lines)
                for report in map(_report, lines):
                    reports.append(report)
                    if not target.fits(report):
                        return Trial(reports, fits=False)
        except DuetError as error:
            return Trial(reports, fits=False, wrong=str(error).splitlines()[0])
        return Trial(reports, fits=True)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, configs))


def _report(told: dict) -> ProgramReport:
    fields: dict[str, Any] = told | {"shape": tuple(told["shape"])}
    return ProgramReport(**fields)


def _plain(config: RunConfig) -> dict:
    return config.model_dump(mode="json")


def _lines(request: dict, topology: Topology) -> Generator[dict, None, None]:
    """Yields the lines of a child, which is killed when the iterator is closed. Raises the error
    that a line holds."""
    request |= {"topology": topology.name, "cache": os.environ.get("DUET_PLAN_CACHE", CACHE)}
    command = [sys.executable, "-m", "rl.plan.compiled"]
    environment = os.environ | topology.environment
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Errors go to a file: a compiler with much output would block on a pipe that is read only at
    # the end.
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(command, stderr=messages, env=environment, **pipes) as child,
    ):
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        try:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                told = _read(line)
                if told is None or told == {"done": True}:
                    continue
                if "error" in told:
                    raise next(
                        kind
                        for kind in DuetError.__subclasses__()
                        if kind.exit_code == told["exit_code"]
                    )(told["error"])
                yield told
        except GeneratorExit:
            child.kill()
            raise
        if child.wait():
            messages.seek(0)
            said = messages.read()[-2000:].strip()
            last = said.rpartition("\n")[2]
            raise ResourceError(
                f"the compiler for {topology.name} ended with {child.returncode}: {last}\n{said}"
            )


def _read(line: str) -> dict | None:
    """Parses a line of the child. Returns None for the output of compilers."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
