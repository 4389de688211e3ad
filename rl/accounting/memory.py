"""Measures the share of memory in use, on the host and on the devices of this process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


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
