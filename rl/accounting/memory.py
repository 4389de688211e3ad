"""Measures the share of memory in use, on the host and on the devices of this process."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from pathlib import Path

from policy.mesh.device_memory import (
    CGROUP,
    PROC,
    control_groups,
    memory_in_use,
    memory_limit,
    read_fields,
)


def metrics() -> dict[str, float]:
    """Returns perf/host_memory_share and, where the devices tell, perf/device_memory_share. Values
    are 0 to 1."""
    return host() | device()


def host(cgroup: Path = CGROUP, proc: Path = PROC) -> dict[str, float]:
    """Returns the largest share in use of the machine's memory, of the limits of the process's
    control groups, and of the process's limit.

    The machine counts what no process can get any more, a control group leaves out file caches that
    it can drop. Empty on systems without /proc.
    """
    shares = []
    if (machine := read_fields(proc / "meminfo")) and "MemAvailable" in machine:
        shares.append(1 - machine["MemAvailable"] / machine["MemTotal"])
    for folder in control_groups(cgroup, proc):
        limit = memory_limit(folder)
        used = memory_in_use(folder)
        if limit is not None and used is not None:
            shares.append(used / limit)
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    size = read_fields(proc / "self" / "status").get("VmSize")
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
