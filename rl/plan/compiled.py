"""Compiles the programs of a plan in a separate process, which may load a compiler for devices that
are not present.

    python -m rl.plan.compiled < {"configs": [{...}], "topology": "v5p:2x2x1", "cache": "FOLDER" or
    null,
                                  "only": [...] or null}

Prints JSON lines. The first is {"device": jax's name of it, "memory": the bytes that a program may
use or null, "count": number of devices, "kept_logits_mib": what a run would choose for this key of
`model`}. Then comes one line per program when it is compiled; `only` selects programs by name. The
last line is {"done": true} or {"error": text, "exit_code": n}. Results of earlier
compilations for the same devices by the same compiler are read from `cache`. With "estimate": true
nothing is compiled, and each configuration gives one line: {"costs": {program: [resident,
temporaries, seconds]}} or {"wrong": text} (rl/plan/estimate.py). With "remat": true each
configuration gives {"remat": policy, "note": text}: what `model.remat: auto` takes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import DuetError, ResourceError
from rl.plan import hlo, hlo_products, hlo_text
from rl.plan.slices import Topology

if TYPE_CHECKING:
    import jax

    from rl.config.run import RunConfig
    from rl.plan.programs import Planned

GIB = 2**30


@dataclass(frozen=True)
class ProgramReport:
    """One program on one device.

    shape: of the arrays that it computes on. arguments to peak: bytes, as in
    policy.programs.compiled_cache.Memory. non_argument: bytes of everything else that the run keeps
    on the device. operations: of products. moved: bytes of HBM traffic. exchanged: [bytes, number]
    by kind of collective. kernels: calls of each kernel. times: runs per step. seconds: compile
    time. teacher: estimates of [operations, bytes of HBM traffic] of a teacher's passes in it.
    notes: what the plan says of it, in lines.
    """

    name: str
    shape: tuple[int, ...]
    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    non_argument: int
    operations: float
    moved: float
    exchanged: dict[str, list[float]]
    kernels: dict[str, float]
    times: float
    seconds: float
    teacher: list[float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def needs(self) -> int:
        """Returns the bytes in use on a device while the program runs."""
        return self.peak + self.non_argument

    @property
    def refused(self) -> bool:
        """Returns whether the compiler refused the program as too large, so that only its peak may
        be known."""
        return not self.arguments

    @property
    def moved_ratio(self) -> float:
        """Returns the bytes moved over the bytes of all arguments."""
        return self.moved / self.arguments


def main() -> int:
    """Answers the request on standard input; returns the exit code."""
    request = json.load(sys.stdin)
    try:
        for line in _lines(request, Topology.read(request["topology"])):
            print(json.dumps(line), flush=True)
    except DuetError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
        return error.exit_code
    print(json.dumps({"done": True}), flush=True)
    return 0


def _lines(request: dict, topology: Topology) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as dump:
        # `as_text` fails for some asynchronous programs, and XLA does not dump programs from jax's
        # own cache.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        )
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        devices = topology.devices()

        from policy.heads.head import kept_logits_mib
        from policy.mesh.device_memory import total_memory

        own = topology.memory(devices[0])
        total = request.get("memory") or total_memory(devices)
        yield {
            "device": devices[0].device_kind,
            "memory": own,
            "count": len(devices),
            "kept_logits_mib": kept_logits_mib(total),
        }
        memory = request.get("memory") or own
        if request.get("estimate"):
            yield from _estimated(request["configs"], devices, memory, total)
            return
        if request.get("remat"):
            yield from _remat(request["configs"], devices, total)
            return
        cache = Path(request["cache"]).expanduser() if request["cache"] else None
        for config in request["configs"]:
            for planned in _planned(_config(config, total), devices, memory):
                if request.get("only") is None or planned.name in request["only"]:
                    yield asdict(_report(planned, topology, Path(dump), cache))


def _config(given: dict, total: float | None) -> RunConfig:
    """Returns a configuration of the request, with the kept logits that a run would choose on
    devices with so many bytes of memory."""
    from rl.config.run import RunConfig
    from rl.run.resume.remat import with_kept_logits

    return with_kept_logits(RunConfig.model_validate(given), total)


def _planned(config: RunConfig, devices: list, memory: float | None) -> Iterator[Planned]:
    from rl.plan.programs import programs
    from rl.run import build

    yield from programs(config, build.on_mesh(config, devices), memory)


def _estimated(
    configs: list[dict], devices: list, memory: float | None, total: float | None
) -> Iterator[dict]:
    from rl.accounting import chips
    from rl.plan.estimate import Estimator

    estimator = Estimator(devices, chips.of(devices[0].device_kind), memory)
    for config in configs:
        try:
            yield {
                "costs": {
                    name: astuple(cost) for name, cost in estimator(_config(config, total)).items()
                }
            }
        except (DuetError, ValueError) as error:
            yield {"wrong": str(error).splitlines()[0]}


def _remat(configs: list[dict], devices: list, total: float | None) -> Iterator[dict]:
    from rl.run import build
    from rl.run.resume import remat

    for config in configs:
        checked = _config(config, total)
        choice = remat.chosen(checked, build.on_mesh(checked, devices), total)
        yield {"remat": choice.policy, "note": str(choice)}


def _report(planned: Planned, topology: Topology, dump: Path, cache: Path | None) -> ProgramReport:
    from rl.plan.estimate import teacher_work

    start = time.perf_counter()
    lowered = planned.lower()
    known = None if cache is None else cache / f"{_key(lowered, topology, planned)}.json"
    if known is not None and known.exists():
        counted = json.loads(known.read_text())
    else:
        counted = _compile(planned, lowered, topology, dump) | {
            "seconds": time.perf_counter() - start
        }
        if known is not None:
            with contextlib.suppress(OSError):
                known.parent.mkdir(parents=True, exist_ok=True)
                known.with_suffix(f".{os.getpid()}").write_text(json.dumps(counted))
                known.with_suffix(f".{os.getpid()}").rename(known)
    fields: dict[str, Any] = {
        "name": planned.name,
        "shape": planned.shape,
        "non_argument": planned.non_argument,
        "times": planned.times,
        "teacher": teacher_work(planned),
        "notes": planned.notes,
    }
    fields |= counted
    return ProgramReport(**fields)


def _key(lowered: jax.stages.Lowered, topology: Topology, planned: Planned) -> str:
    """Hashes all that the result depends on: the program, the devices, the compiler versions and
    the counting code."""
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("duet-rl", "jax", "jaxlib")
    ]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("libtpu"))
    counting = (hlo.__file__, hlo_products.__file__, hlo_text.__file__, __file__)
    versions += [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in counting]
    # Source lines in the text say nothing about the program.
    text = re.sub(r"loc\([^)]*\)", "", lowered.as_text())
    counted = f"{planned.trip_count} {planned.dispatch} {planned.occupancy} {planned.kernels}"
    return hashlib.sha256(
        "\n".join([*versions, topology.name, counted, text]).encode()
    ).hexdigest()[:32]


def _compile(planned: Planned, lowered: jax.stages.Lowered, topology: Topology, dump: Path) -> dict:
    from policy.programs.compiled_cache import Memory

    for old in filter(Path.is_file, dump.iterdir()):
        old.unlink()
    try:
        executable = lowered.compile()
    except Exception as error:  # the compiler raises many kinds: out of memory, unsupported
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text or "exceeded" in text.lower():
            return _too_large(text)
        raise ResourceError(
            f"{planned.name} does not compile: {text.splitlines()[0] if text else error!r}"
        ) from error
    texts = sorted(dump.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    memory = Memory.of(executable, topology.platform)
    assert memory is not None, "the compilers of all platforms analyse memory"
    return asdict(memory) | counts(texts[-1].read_text(), planned)


def counts(text: str, planned: Planned) -> dict:
    """Counts the work of a compiled program. For a multi-step decode: per step, and work done once
    is spread."""
    steps = planned.dispatch
    program = hlo.HloProgram(text, planned.kernels, planned.trip_count * steps, planned.occupancy)
    exchanged: dict[str, list[float]] = {}
    for each in program.exchanged():
        total = exchanged.setdefault(each.kind, [0.0, 0.0])
        total[0] += each.bytes * each.times / steps
        total[1] += each.times / steps
    return {
        "operations": program.operations() / steps,
        "moved": sum(each.bytes for each in program.moved()) / steps,
        "exchanged": exchanged,
        "kernels": {name: calls / steps for name, calls in program.kernel_calls().items()},
    }


def _too_large(text: str) -> dict:
    """Returns the counts of a program that the compiler refused as too large, with the size that
    its message names."""
    used = re.search(r"Used ([\d.]+)([KMGT]?) of", text)
    size = float(used[1]) * 1024 ** " KMGT".index(used[2] or " ") if used else float("inf")
    blank = dict.fromkeys(("arguments", "temporaries", "outputs", "aliased"), 0)
    return blank | {"peak": size, "operations": 0.0, "moved": 0.0, "exchanged": {}, "kernels": {}}


if __name__ == "__main__":
    raise SystemExit(main())
