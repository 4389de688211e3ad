"""A disk of a given size, for tests of what happens when it is full: a file system in memory, in a
namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_NAMESPACE = ("unshare", "--mount", "--map-root-user")


def available() -> bool:
    """Tells whether this machine lets a process mount a file system for itself."""
    try:
        mount = [*_NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(mount, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(
    script: str | Path, *arguments: object, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Runs a Python script that may call `mount` and `resize`, and import modules of this
    folder."""
    command = [str(part) for part in (*_NAMESPACE, sys.executable, script, *arguments)]
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join(
        [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = os.environ | {"PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=tests.parent, env=environment
    )


def mount(directory: str | Path, bytes_: int) -> None:
    """Mounts a disk of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={bytes_}", "none", directory], check=True)


def resize(directory: str | Path, bytes_: int) -> None:
    """Gives a mounted disk another size, at least what is on it."""
    subprocess.run(["mount", "-o", f"remount,size={bytes_}", directory], check=True)


def used(directory: str | Path) -> int:
    """Returns the bytes that a directory takes on its disk."""
    return int(
        subprocess.run(
            ["du", "-s", "--block-size=1", directory], check=True, capture_output=True, text=True
        ).stdout.split()[0]
    )
