"""Records the attempts of a run in run.json: when, with which command, on what, and how each
ended."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TypedDict

from policy.json_types import JsonValue
from policy.mesh import processes
from rl.errors import DuetError, ResourceError, no_room
from rl.records.run_files import ATTEMPTS, attempt_entries

_LOG = logging.getLogger("duet.events")
_PACKAGES = (
    "duet-rl",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokamax",
    "numpy",
)
# Beginnings of the names of environment variables that change what a run does, or what it may read.
_VARIABLES = (
    *("CUDA_", "DUET_", "JAX_", "LIBTPU_", "NCCL_", "PJRT_", "TPU_", "XLA_"),
    *("AWS_", "GOOGLE_", "HF_", "MLFLOW_", "TRACKIO_", "WANDB_"),
)


class DeviceFacts(TypedDict):
    """The devices of a run, as run.json has them. kind: as jax names the first device."""

    platform: str
    kind: str
    count: int
    processes: int


class Manifest:
    """One attempt of a run, from `__enter__` to `__exit__`. A killed process leaves an attempt
    without an end.

    Only the first process writes. On a full disk the record is left out, with a warning.
    """

    def __init__(self, directory: Path):
        self._path = directory / ATTEMPTS
        self._attempts: list[dict[str, object]] = []

    def __enter__(self) -> Manifest:
        if processes.first():
            self._attempts = [{**each} for each in attempt_entries(self._path.parent, [])]
            if not self._attempts and self._path.exists():  # damaged: kept for people
                self._path.replace(self._path.with_suffix(".json.damaged"))
            attempt: dict[str, object] = {
                "start": round(time.time(), 3),
                "command": sys.argv,
                "directory": os.getcwd(),
                "environment": variables(),
            }
            self._attempts.append(
                attempt | {"host": socket.gethostname(), "versions": versions()} | git_state()
            )
            self._write()
        return self

    def note(self, **facts: object) -> None:
        """Adds facts to the attempt, for instance its devices."""
        if processes.first():
            self._attempts[-1] |= facts
            self._write()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.note(end=round(time.time(), 3), exit_code=exit_code(error))

    def _write(self) -> None:
        temporary = self._path.with_suffix(".json.tmp")
        try:
            temporary.write_text(json.dumps({"attempts": self._attempts}, indent=1) + "\n")
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _LOG.warning("%s cannot be written: %s", self._path, error.strerror)


def variables() -> list[str]:
    """Returns the names of the environment variables that are set and matter to a run. Their values
    may be secrets."""
    return sorted(name for name in os.environ if name.startswith(_VARIABLES))


def exit_code(error: BaseException | None) -> int:
    """Returns the exit code of the command that ends with `error`."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, DuetError):
        return error.exit_code
    return ResourceError.exit_code if no_room(error) else 1


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide the numbers of a run."""
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a clone that is not installed
            continue
    return result


def devices() -> DeviceFacts:
    """Returns platform, kind and number of jax's devices, and the number of processes."""
    import jax

    every = jax.devices()
    return {
        "platform": every[0].platform,
        "kind": every[0].device_kind,
        "count": len(every),
        "processes": processes.count(),
    }


def git_state() -> dict[str, JsonValue]:
    """Returns {"git": {"commit", "changed"}} of the working directory; {} outside a repository or
    without git."""
    try:
        asked = {"capture_output": True, "text": True, "timeout": 5, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **asked).stdout.strip()
        # Without the lock of the index, which a process that is killed would leave behind.
        status = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, **asked).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git": {"commit": commit, "changed": bool(changed.strip())}}
