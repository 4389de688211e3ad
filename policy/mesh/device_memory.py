"""How much memory a device has in total, whatever is in use: equal machines give equal numbers, so
a choice by them is the same in every run and when a run continues."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import Any

GIB = 2**30

# GiB that a program may use on a TPU, by jax's name of the device: the limits of libtpu 0.0.52 (for
# v4, per chip, from its error messages). Devices that are only described do not tell theirs.
TPU_GIB = {
    "TPU7x": 94.74,
    "TPU v6": 31.24,
    "TPU v5 lite": 15.75,
    "TPU v5e": 15.75,
    "TPU v5": 95.73,
    "TPU v4": 30.75,
}


def total_memory(device: Any) -> int | None:
    """Returns the bytes of a device, full GiB; None if they are unknown.

    On a CPU the devices of the process share the memory of the host, or of its container. On a GPU
    it is the memory that jax reserves.
    """
    if device.platform == "cpu":
        total = _host_memory() // len(device.client.local_devices())
    elif device.platform == "tpu":
        kinds = (gib for kind, gib in TPU_GIB.items() if kind in device.device_kind)
        total = int(next(kinds, 0) * GIB)
    else:
        total = (device.memory_stats() or {}).get("bytes_limit", 0)
    return total // GIB * GIB or None


@cache
def _host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of the host's memory, or of the limit of its container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(limit.read_text()))
    return total
