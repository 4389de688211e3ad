"""Compiles the programs of a plan in a process of its own, which may load a compiler for devices that are not there.

    python -m rl.plan.compiled < {"configs": [{...}], "topology": "v5p:2x2x1", "cache": "FOLDER" or null, "only": [...] or null}

Prints JSON lines: first {"device": what jax calls it, "memory": its bytes or null, "count": of devices}; then one for each program
as it is done, of all or of those that `only` names; and a last one {"done": true} or {"error": text, "exit_code": n}. What was
compiled before, for the same devices by the same compiler, is read from `cache`. With "estimate": true nothing is compiled: a line
for each of the configurations, {"costs": {program: [held, temporaries, seconds]}} or {"wrong": text} (rl/plan/estimate.py).
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
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from rl.errors import DuetError, ResourceError
from rl.plan import hlo
from rl.plan.slices import Topology

GIB = 2**30


@dataclass(frozen=True)
class Report:
    """One program on one device. `shape`: what it computes on. Bytes: `arguments` to `peak` as in policy.execution.compiled_cache.Memory;
    `stays`: of what else the run keeps there. `operations` of products; `moved` bytes of memory; `exchanged`: [bytes, number] by
    kind of collective; `kernels`: calls of kernels. `times`: runs a step. `seconds`: of compiling it."""

    name: str
    shape: tuple[int, ...]
    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    stays: int
    operations: float
    moved: float
    exchanged: dict[str, list[float]]
    kernels: dict[str, float]
    times: float
    seconds: float

    @property
    def needs(self) -> int:
        """Bytes of a device while the program runs."""
        return self.peak + self.stays


def main() -> int:
    request = json.load(sys.stdin)
    try:
        for line in _lines(request, Topology.read(request["topology"])):
            print(json.dumps(line), flush=True)
    except DuetError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
        return error.exit_code
    print(json.dumps({"done": True}), flush=True)
    return 0


def _lines(request: dict, topology: Topology):
    with tempfile.TemporaryDirectory() as dump:
        # `as_text` of a compiled program fails for some that are asynchronous, and a program from jax's own cache is not dumped.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        devices = topology.devices()
        own = topology.memory(devices[0])
        yield {"device": devices[0].device_kind, "memory": own, "count": len(devices)}
        memory = request.get("memory") or own
        if request.get("estimate"):
            yield from _estimated(request["configs"], devices, memory)
            return
        cache = Path(request["cache"]).expanduser() if request["cache"] else None
        for config in request["configs"]:
            for planned in _planned(config, devices, memory):
                if request.get("only") is None or planned.name in request["only"]:
                    yield asdict(_report(planned, topology, Path(dump), cache))


def _planned(config: dict, devices, memory: float | None):
    from rl.config.run import RunConfig
    from rl.plan.programs import programs
    from rl.run import build

    checked = RunConfig.model_validate(config)
    yield from programs(checked, build.on_mesh(checked, devices), memory)


def _estimated(configs: list[dict], devices, memory: float | None):
    from rl.config.run import RunConfig
    from rl.plan.estimate import Estimator
    from rl.reporting import chips

    estimator = Estimator(devices, chips.of(devices[0].device_kind), memory)
    for config in configs:
        try:
            yield {"costs": {name: astuple(cost) for name, cost in estimator(RunConfig.model_validate(config)).items()}}
        except (DuetError, ValueError) as error:
            yield {"wrong": str(error).splitlines()[0]}


def _report(planned, topology: Topology, dump: Path, cache: Path | None) -> Report:
    began = time.perf_counter()
    lowered = planned.lower()
    known = None if cache is None else cache / f"{_key(lowered, topology, planned)}.json"
    if known is not None and known.exists():
        found = json.loads(known.read_text())
    else:
        found = _compile(planned, lowered, topology, dump) | {"seconds": time.perf_counter() - began}
        if known is not None:
            with contextlib.suppress(OSError):
                cache.mkdir(parents=True, exist_ok=True)
                known.with_suffix(f".{os.getpid()}").write_text(json.dumps(found))
                known.with_suffix(f".{os.getpid()}").rename(known)
    return Report(name=planned.name, shape=planned.shape, stays=planned.stays, times=planned.times, **found)


def _key(lowered, topology: Topology, planned) -> str:
    """What the result depends on: the program, the devices, the versions of the compilers and how is counted."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("duet-rl", "jax", "jaxlib")]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("libtpu"))
    versions += [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (hlo.__file__, __file__)]
    # The text names source lines, which say nothing about the program.
    text = re.sub(r"loc\([^)]*\)", "", lowered.as_text())
    counted = f"{planned.trip_count} {planned.dispatch} {planned.occupancy} {planned.kernels}"
    return hashlib.sha256("\n".join([*versions, topology.name, counted, text]).encode()).hexdigest()[:32]


def _compile(planned, lowered, topology: Topology, dump: Path) -> dict:
    from policy.execution.compiled_cache import Memory

    for old in filter(Path.is_file, dump.iterdir()):
        old.unlink()
    try:
        done = lowered.compile()
    except Exception as error:  # of many kinds: what does not fit, what the compiler has no form for
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text or "exceeded" in text.lower():
            return _too_large(text)
        raise ResourceError(f"{planned.name} does not compile: {text.splitlines()[0] if text else error!r}") from error
    texts = sorted(dump.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    return asdict(Memory.of(done, topology.platform)) | counts(texts[-1].read_text(), planned)


def counts(text: str, planned) -> dict:
    """What a compiled program does; of a dispatch that decodes the mean of its steps, over which what it does once is spread."""
    steps = planned.dispatch
    program = hlo.Program(text, planned.kernels, planned.trip_count * steps, planned.occupancy)
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
    """Of a program that the compiler gives up because the memory of the device does not hold it: what it says of its size."""
    used = re.search(r"Used ([\d.]+)([KMGT]?) of", text)
    size = float(used[1]) * 1024 ** " KMGT".index(used[2] or " ") if used else float("inf")
    blank = dict.fromkeys(("arguments", "temporaries", "outputs", "aliased"), 0)
    return blank | {"peak": size, "operations": 0.0, "moved": 0.0, "exchanged": {}, "kernels": {}}


if __name__ == "__main__":
    raise SystemExit(main())
