"""Looks at the machine before a run: versions, devices, disk, memory, limits, caches, secrets by
name.

Each line is (level, text); a level other than `ok` says what to change.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rl.accounting import memory
from rl.records.manifest import versions

GIB = 2**30
DISK_GIB = 10.0
SHARED_GIB = 1.0
FILES = 4096
MEMORY = 0.92
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


@dataclass(frozen=True)
class MachineFact:
    """One fact about the machine. level: ok, warn or error. change: what to do about a warning or
    an error."""

    topic: str
    level: Literal["ok", "warn", "error"]
    text: str
    change: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "warn": "warn", "error": "ERR "}[self.level]
        return f"{mark} {self.topic}: {self.text}{f'. {self.change}' if self.change else ''}"

    def to_json(self) -> dict[str, str]:
        """Returns all fields."""
        return asdict(self)


def machine(runs: Path, cache: Path | None) -> list[MachineFact]:
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
            else [MachineFact("program cache", "warn", "none is kept", "Set run.program_cache")]
        ),
        *_secrets(),
    ]


def _versions() -> Iterator[MachineFact]:
    shown = ", ".join(f"{name} {version}" for name, version in versions().items())
    level = "ok" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "warn"
    yield MachineFact(
        "versions", level, shown, "" if level == "ok" else "Duet is tested with Python 3.11 to 3.13"
    )


def _devices() -> Iterator[MachineFact]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield MachineFact(
            "devices",
            "error",
            f"jax has none: {error}",
            "Set JAX_PLATFORMS=cpu, or install duet-rl[tpu] or duet-rl[cuda]",
        )
        return
    kind = devices[0].device_kind
    platform = devices[0].platform
    text = f"{len(devices)} x {kind} ({platform})"
    other = _accelerator() if platform == "cpu" else None
    if other:
        yield MachineFact(
            "devices",
            "warn",
            f"{text}, but this machine has {other}",
            "Install duet-rl[tpu] or duet-rl[cuda]",
        )
    else:
        yield MachineFact("devices", "ok", text)
    if shares := memory.share_of(device.memory_stats() for device in jax.local_devices()):
        share = shares["perf/device_memory_share"]
        level = "ok" if share < MEMORY else "warn"
        yield MachineFact(
            "device memory",
            level,
            f"{share:.0%} in use",
            "" if level == "ok" else "End the other process on it",
        )


def _accelerator() -> str | None:
    """Returns the accelerator that the system shows, whatever jax sees."""
    if Path("/dev/nvidia0").exists():
        return "an NVIDIA GPU"
    return "a TPU" if Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists() else None


def _disk(topic: str, folder: Path) -> Iterator[MachineFact]:
    existing = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )
    if not os.access(existing, os.W_OK):
        yield MachineFact(
            topic, "error", f"{existing} cannot be written to", "Choose another run.dir"
        )
        return
    free = shutil.disk_usage(existing).free / GIB
    low = free < DISK_GIB
    yield MachineFact(
        topic,
        "warn" if low else "ok",
        f"{existing}: {free:,.1f} GiB free",
        "A checkpoint holds weights and moments, 12 bytes per weight in float32" if low else "",
    )


def _memory() -> Iterator[MachineFact]:
    share = memory.host().get("perf/host_memory_share")
    if share is not None:
        level = "ok" if share < MEMORY else "warn"
        yield MachineFact(
            "host memory",
            level,
            f"{share:.0%} in use",
            "" if level == "ok" else "End other processes",
        )


def _shared_memory() -> Iterator[MachineFact]:
    folder = Path("/dev/shm")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free / GIB
        low = free < SHARED_GIB
        yield MachineFact(
            "shared memory",
            "warn" if low else "ok",
            f"{free:,.1f} GiB free",
            "docker run --shm-size=8g" if low else "",
        )


def _files() -> Iterator[MachineFact]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < FILES
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    yield MachineFact(
        "open files", "warn" if low else "ok", f"limit {soft}", f"ulimit -n {most}" if low else ""
    )


def _cache(folder: Path) -> Iterator[MachineFact]:
    folder = folder.expanduser()
    change = "Set run.program_cache or JAX_COMPILATION_CACHE_DIR"
    if not folder.exists():
        yield from (
            MachineFact(
                "program cache",
                "ok" if line.level == "ok" else "warn",
                f"{line.text}, not there yet",
                change,
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
            yield MachineFact(
                "program cache", "ok", f"{folder}: {len(files)} programs, {size:.2f} GiB"
            )
    except OSError as error:
        text = f"{folder} cannot be written to ({error.strerror}): every run compiles again"
        yield MachineFact("program cache", "warn", text, change)


def _secrets() -> Iterator[MachineFact]:
    states = ", ".join(
        f"{name} is {'set' if os.environ.get(name) else 'not set'}" for name in SECRETS
    )
    offline = "; HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
    yield MachineFact("environment", "ok", states + offline)


def to_json(lines: list[MachineFact]) -> list[dict[str, Any]]:
    """Returns the lines as values that JSON can hold."""
    return [line.to_json() for line in lines]
