"""The command `rl plan`: a child process compiles, this one shows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl import chips
from rl.config import RunConfig
from rl.errors import DuetError, ResourceError
from rl.plan.compiled import GIB, Report
from rl.plan.slices import TPUS, Topology

CACHE = "~/.cache/duet-rl/plans"


def plan(config: RunConfig, name: str, file: Path | None = None) -> int:
    """Prints the plan. Returns 0 where every program fits, 1 where one does not.

    Raises ConfigError for a topology that is none or a configuration that cannot run there, ResourceError for a slice that cannot
    be described here.
    """
    topology = Topology.read(name)
    reports = []
    print(f"{name}: compiling the programs of {', '.join(config.stage_names)}", flush=True)
    for report in compile_apart(config, topology):
        print(f"  {report.name}: {report.seconds:.0f} s", flush=True)
        reports.append(report)
    chip = chips.of(TPUS[name.partition(":")[0]]) if topology.platform == "tpu" else None
    print(table(reports, chip))
    if file is not None:
        file.write_text(json.dumps({"topology": name, "programs": [dataclasses.asdict(each) for each in reports]}, indent=1) + "\n")
    too_large = [each.name for each in reports if chip and each.needs > chip.memory * GIB]
    if too_large:
        print(f"does not fit {chip.memory:g} GiB a chip: {', '.join(too_large)}")
    elif chip:
        print(f"fits: at most {max(each.needs for each in reports) / GIB:.1f} of {chip.memory:g} GiB a chip")
    return 1 if too_large else 0


def compile_apart(config: RunConfig, topology: Topology) -> Iterator[Report]:
    """The Report of each program, compiled in a process of its own."""
    request = {
        "config": config.model_dump(mode="json"),
        "topology": topology.name,
        "cache": os.environ.get("DUET_PLAN_CACHE", CACHE),
    }
    command, environment = [sys.executable, "-m", "rl.plan.compiled"], os.environ | topology.environment
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Errors go into a file: a compiler that says much would wait for a pipe that is read only at the end.
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stderr=complaints, env=environment, **pipes) as child,
    ):
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        for line in child.stdout:
            told = _read(line)
            if told is None or told == {"done": True}:
                continue
            if "error" in told:
                raise next(kind for kind in DuetError.__subclasses__() if kind.exit_code == told["exit_code"])(told["error"])
            yield Report(**told)
        if child.wait():
            complaints.seek(0)
            raise ResourceError(f"the compiler for {topology.name} ended with {child.returncode}:\n{complaints.read()[-2000:]}")


def _read(line: str) -> dict | None:
    """A line of the child; what compilers print besides is None."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def table(reports: Sequence[Report], chip: chips.Chip | None) -> str:
    """A line for each program."""
    head = ["program", "arguments", "temporary", "peak", "beside", "FLOP", "moved", "exchanged", "a step", "at least"]
    lines = [head]
    for each in reports:
        exchanged = ", ".join(f"{kind} {_bytes(size)}" for kind, (size, _) in sorted(each.exchanged.items())) or "-"
        least = "" if chip is None else f"{each.times * bound(each, chip):.3g} s"
        sizes = map(_bytes, (each.arguments, each.temporaries, each.peak, each.stays))
        work = (f"{each.operations:.2e}", _bytes(each.moved))
        lines.append([each.name, *sizes, *work, exchanged, f"x {each.times:.4g}", least])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = (0, 7)
    shown = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]
    notes = [
        "Of one device and one run of the program, which runs so many times a step; beside: what else lies in its memory then;"
    ]
    notes.append("exchanged: the larger of what a collective takes and gives.")
    if chip is not None:
        whole = sum(each.times * bound(each, chip) for each in reports)
        notes.append(
            f"a step takes {whole:.3g} s at least: for each program the longest of operations at {chip.tflops:g} TFLOP/s, bytes "
            f"moved at {chip.bandwidth:g} GB/s and exchanged at {chip.links:g} GB/s"
        )
    return "\n".join([*shown, *notes])


def _bytes(size: float) -> str:
    unit = next((unit for unit in ("G", "M") if size >= 2 ** {"G": 30, "M": 20}[unit]), "K")
    return f"{size / 2 ** {'G': 30, 'M': 20, 'K': 10}[unit]:.2f} {unit}iB"


def bound(report: Report, chip: chips.Chip) -> float:
    """Seconds that one run of the program takes at least, where nothing waits for anything."""
    exchanged = sum(size for size, _ in report.exchanged.values())
    links = exchanged / (chip.links * 1e9) if chip.links else 0.0
    return max(report.operations / (chip.tflops * 1e12), report.moved / (chip.bandwidth * 1e9), links)
