"""Looks at the machine before a run: versions, devices, disk, memory, limits, caches, secrets by
name.

Each is a fault, named after a part of the machine; one of the level `note` is nothing wrong.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rl.accounting import memory
from rl.errors import Fault, Level
from rl.records.manifest import versions
from rl.remote.probe import writable

GIB = 2**30
DISK_GIB = 10.0
SHARED_GIB = 1.0
FILES = 4096
MEMORY = 0.92
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
_MARKS: dict[Level, str] = {"note": "ok  ", "warn": "warn", "refuse": "ERR "}
_LEVELS: dict[Level, str] = {"note": "ok", "warn": "warn", "refuse": "error"}
"""The level in the output of `--json`."""


def machine(runs: Path, cache: Path | None) -> list[Fault]:
    """Returns facts about this machine.

    runs: folder for runs. cache: folder of compiled programs; None: none is kept. Looks at the
    devices with jax, which takes seconds.
    """
    return [
        *_versions(),
        *_devices(),
        *_disk("run folder", runs),
        *_memory(),
        *_shared_memory(),
        *_files(),
        *(
            _cache(cache)
            if cache is not None
            else [
                Fault("none is kept", "Set run.program_cache", level="warn", name="program cache")
            ]
        ),
        *_secrets(),
    ]


def remote(url: str) -> Fault:
    """Tells whether a remote folder (`run.remote`) can be written to, by writing to it."""
    result = writable(url)
    if result.problem:
        return Fault(
            result.problem,
            "See docs/remote.md for packages and credentials",
            name="remote folder",
        )
    lock = "" if result.compares_generations else "; its lock is checked, not conditional"
    return Fault(f"{url} can be written, read and listed{lock}", level="note", name="remote folder")


def _versions() -> Iterator[Fault]:
    shown = ", ".join(f"{name} {version}" for name, version in versions().items())
    level = "note" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "warn"
    yield Fault(
        shown,
        "" if level == "note" else "Duet is tested with Python 3.11 to 3.13",
        level=level,
        name="versions",
    )


def _devices() -> Iterator[Fault]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Fault(
            f"jax has none: {error}",
            "Set JAX_PLATFORMS=cpu, or install duet-rl[tpu] or duet-rl[cuda]",
            name="devices",
        )
        return
    kind = devices[0].device_kind
    platform = devices[0].platform
    text = f"{len(devices)} x {kind} ({platform})"
    other = _accelerator() if platform == "cpu" else None
    if other:
        yield Fault(
            f"{text}, but this machine has {other}",
            "Install duet-rl[tpu] or duet-rl[cuda]",
            level="warn",
            name="devices",
        )
    else:
        yield Fault(text, level="note", name="devices")
    if shares := memory.share_of(device.memory_stats() for device in jax.local_devices()):
        share = shares["perf/device_memory_share"]
        level = "note" if share < MEMORY else "warn"
        yield Fault(
            f"{share:.0%} in use",
            "" if level == "note" else "End the other process on it",
            level=level,
            name="device memory",
        )


def _accelerator() -> str | None:
    """Returns the accelerator that the system shows, whatever jax sees."""
    if Path("/dev/nvidia0").exists():
        return "an NVIDIA GPU"
    return "a TPU" if Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists() else None


def _disk(topic: str, folder: Path) -> Iterator[Fault]:
    existing = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )
    if not os.access(existing, os.W_OK):
        yield Fault(f"{existing} cannot be written to", "Choose another run.dir", name=topic)
        return
    free = shutil.disk_usage(existing).free / GIB
    low = free < DISK_GIB
    yield Fault(
        f"{existing}: {free:,.1f} GiB free",
        "A checkpoint holds weights and moments, 12 bytes per weight in float32" if low else "",
        level="warn" if low else "note",
        name=topic,
    )


def _memory() -> Iterator[Fault]:
    share = memory.host().get("perf/host_memory_share")
    if share is not None:
        level = "note" if share < MEMORY else "warn"
        yield Fault(
            f"{share:.0%} in use",
            "" if level == "note" else "End other processes",
            level=level,
            name="host memory",
        )


def _shared_memory() -> Iterator[Fault]:
    folder = Path("/dev/shm")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free / GIB
        low = free < SHARED_GIB
        yield Fault(
            f"{free:,.1f} GiB free",
            "docker run --shm-size=8g" if low else "",
            level="warn" if low else "note",
            name="shared memory",
        )


def _files() -> Iterator[Fault]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < FILES
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    yield Fault(
        f"limit {soft}",
        f"ulimit -n {most}" if low else "",
        level="warn" if low else "note",
        name="open files",
    )


def _cache(folder: Path) -> Iterator[Fault]:
    folder = folder.expanduser()
    change = "Set run.program_cache or JAX_COMPILATION_CACHE_DIR"
    if not folder.exists():
        yield from (
            Fault(
                f"{line.text}, not there yet",
                change,
                level="note" if line.level == "note" else "warn",
                name="program cache",
            )
            for line in _disk("", folder)
        )
        return
    files = [
        entry
        for entry in os.scandir(folder)
        if entry.is_file() and not entry.name.endswith("-atime")
    ]
    size = sum(entry.stat().st_size for entry in files) / GIB
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            yield Fault(
                f"{folder}: {len(files)} programs, {size:.2f} GiB",
                level="note",
                name="program cache",
            )
    except OSError as error:
        text = f"{folder} cannot be written to ({error.strerror}): every run compiles again"
        yield Fault(text, change, level="warn", name="program cache")


def _secrets() -> Iterator[Fault]:
    states = ", ".join(
        f"{name} is {'set' if os.environ.get(name) else 'not set'}" for name in SECRETS
    )
    offline = "; HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
    yield Fault(states + offline, level="note", name="environment")


def line(fault: Fault) -> str:
    """Returns a fault as a line of `rl doctor`: its mark, then its message."""
    return f"{_MARKS[fault.level]} {fault.message()}"


def to_json(fault: Fault) -> dict[str, str]:
    """Returns a fault as `rl doctor --json` prints it."""
    return {
        "topic": fault.name,
        "level": _LEVELS[fault.level],
        "text": fault.text,
        "change": fault.change,
    }
