"""How much memory a device has in total, whatever is in use: equal machines give equal numbers, so
a choice by them is the same in every run and when a run continues.

The control groups of this process are read here too, since they limit the memory of a CPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20

# GiB of a device, by a part of jax's name of its kind; the first match counts. TPUs: what a program
# may use, the limits of libtpu 0.0.52 (of v4, per chip, from its error messages). GPUs: all memory,
# of which jax reserves three quarters.
KIND_GIB = {
    "TPU7x": 94.74,
    "TPU v6": 31.24,
    "TPU v5 lite": 15.75,
    "TPU v5e": 15.75,
    "TPU v5": 95.73,
    "TPU v4": 30.75,
    "B200": 180.0,
    "H200": 141.0,
    "H100": 80.0,
    "A100-SXM4-40GB": 40.0,
    "A100-PCIE-40GB": 40.0,
    "A100": 80.0,
    "L40S": 48.0,
    "L4": 24.0,
}

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Machines of a shape differ by a few pages.
_STEP = 256 * MIB


def known_kind(device_kind: str) -> str | None:
    """Returns the key of KIND_GIB for jax's name of a device; None if it is not listed. A GH200 is
    no H200, an L40 no L4."""
    return next((kind for kind in KIND_GIB if _names(device_kind, kind)), None)


def _names(device_kind: str, kind: str) -> bool:
    pattern = rf"(?<![a-z0-9]){re.escape(kind)}(?![0-9])"
    return re.search(pattern, device_kind, re.IGNORECASE) is not None


def total_memory(devices: Iterable[Any]) -> int | None:
    """Returns the bytes of memory of each of the devices that compute together; None if they are
    unknown.

    They are of one kind. KIND_GIB tells its memory; of another kind the memory that jax reserves
    counts. On a CPU the devices of this process share `host_memory`.
    """
    import jax

    every = list(devices)
    own = [each for each in every if each.process_index == jax.process_index()] or every
    kind = known_kind(own[0].device_kind)
    if kind is not None:
        return int(KIND_GIB[kind] * GIB)
    if own[0].platform == "cpu":
        total = host_memory()
        return total and total // len(own)
    return (own[0].memory_stats() or {}).get("bytes_limit")


def host_memory(cgroup: Path = CGROUP, proc: Path = PROC) -> int | None:
    """Returns the bytes of memory that this process may use: the memory of the machine, or the
    smallest limit of its control groups, in full steps of 256 MiB. None on systems without
    /proc."""
    total = read_fields(proc / "meminfo").get("MemTotal")
    limits = [memory_limit(folder) for folder in control_groups(cgroup, proc)]
    sizes = [limit for limit in limits if limit is not None]
    if total is not None:
        sizes.append(total * 1024)
    return max(_STEP, min(sizes) // _STEP * _STEP) if sizes else None


def control_groups(cgroup: Path = CGROUP, proc: Path = PROC) -> list[Path]:
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


def memory_limit(folder: Path) -> int | None:
    """Returns the memory limit of a control group in bytes; None: it has none."""
    limits = [read_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit), default=None)


def memory_in_use(folder: Path) -> int | None:
    """Returns the bytes that a control group uses, without caches of files that it can drop; None
    if it does not tell."""
    names = ("memory.current", "memory.usage_in_bytes")
    used = [number for name in names if (number := read_number(folder / name)) is not None]
    statistics = read_fields(folder / "memory.stat")
    # Version 1 tells the group alone as inactive_file, and the group with those below it as total_.
    caches = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return used[0] - caches if used else None


def read_fields(file: Path) -> dict[str, int]:
    """Reads lines `name value` or `name: value kB`. Returns {} for a file that cannot be read."""
    result = {}
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, rest = line.replace(":", " ").partition(" ")
            value = rest.split()[:1]
            if value and value[0].isdecimal():
                result[name] = int(value[0])
    return result


def read_number(file: Path) -> int | None:
    """Reads a file with one number. Returns None for another text (`max`) and for a file that
    cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
