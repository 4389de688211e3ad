"""Measures memory: the share in use, on the host and on the devices of this process, and how much a
device has."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl.accounting import chips

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_STEP = 2**28


def metrics() -> dict[str, float]:
    """Returns perf/host_memory_share and, where the devices tell, perf/device_memory_share. Values
    are 0 to 1."""
    return host() | device()


def host(cgroup: Path = _CGROUP, proc: Path = _PROC) -> dict[str, float]:
    """Returns the largest share in use of the machine's memory, of the container's limit, and of
    the process's limit.

    The machine counts what no process can get any more, the container leaves out file caches that
    it can drop. Empty on systems without /proc.
    """
    shares = []
    if (machine := _fields(proc / "meminfo")) and "MemAvailable" in machine:
        shares.append(1 - machine["MemAvailable"] / machine["MemTotal"])
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit and used is not None:
        cache = _fields(cgroup / "memory.stat").get("inactive_file", 0)
        shares.append((used - cache) / limit)
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    size = _fields(proc / "self" / "status").get("VmSize")
    if address_space != resource.RLIM_INFINITY and size is not None:
        shares.append(size * 1024 / address_space)
    return {"perf/host_memory_share": max(shares)} if shares else {}


def device() -> dict[str, float]:
    """Returns the peak of the fullest device of this process as a share of its limit. Empty on
    CPU."""
    import jax

    return share_of(each.memory_stats() for each in jax.local_devices())


def of_device(device: Any, count: int) -> float | None:
    """Returns the bytes of memory of a device, the same on all machines of a shape: the number of
    rl/accounting/chips.py, of a CPU its share of the memory that this process may use. None:
    unknown.

    count: devices of the CPU, which share its memory.
    """
    if (chip := chips.of(device.device_kind)) is not None:
        return chip.memory * 2**30
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return None if limit is None else float(limit)
    return None if (total := of_host()) is None else float(total // count)


def of_host(cgroup: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """Returns the bytes of memory that this process may use: those of the machine, or the smallest
    limit of its control groups, in full steps of 256 MiB, since machines of a shape differ by a few
    pages. None on systems without /proc."""
    total = _fields(proc / "meminfo").get("MemTotal")
    limits = [limit for folder in _groups(cgroup, proc) if (limit := _limit(folder)) is not None]
    sizes = [*limits, *([] if total is None else [total * 1024])]
    return max(_STEP, min(sizes) // _STEP * _STEP) if sizes else None


def _groups(cgroup: Path, proc: Path) -> list[Path]:
    """Returns the folders of the control groups of this process that may limit its memory, from its
    own to the root, in the layouts of versions 2 and 1."""
    folders = [cgroup, cgroup / "memory"]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = cgroup / controllers
                own = root / path.lstrip("/")
                folders += [own, *(each for each in own.parents if root in each.parents)]
    return folders


def _limit(folder: Path) -> int | None:
    """Returns the memory limit of a control group in bytes; None: it has none."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit), default=None)


def share_of(statistics: Iterable[Mapping[str, int] | None]) -> dict[str, float]:
    """Returns the metric for the memory statistics of devices, each a mapping or None."""
    peaks = [
        stats["peak_bytes_in_use"] / stats["bytes_limit"]
        for stats in statistics
        if stats and stats.get("bytes_limit") and "peak_bytes_in_use" in stats
    ]
    return {"perf/device_memory_share": max(peaks)} if peaks else {}


def _fields(file: Path) -> dict[str, int]:
    """Reads lines `name value` or `name: value kB`. Returns {} for a file that cannot be read."""
    result = {}
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, rest = line.replace(":", " ").partition(" ")
            value = rest.split()[:1]
            if value and value[0].isdecimal():
                result[name] = int(value[0])
    return result


def _number(file: Path) -> int | None:
    """Reads a file with one number. Returns None for another text (`max`) and for a file that
    cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
