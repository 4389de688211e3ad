"""Defines the errors that end a run in a known way, each with its exit code, and `Fault`, which
says what is wrong with a configuration, the data, a run or the machine.

The command line prints such an error as plain text and exits with its code. Any other exception is
a bug: Python shows its traceback and exits with code 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewards.registry import RewardError, RewardFailed

Level = Literal["refuse", "warn", "note"]
"""How bad a fault is: `refuse` keeps a run from starting, `note` is a remark."""
Key = tuple[str | int, ...]
"""The keys and indices that lead to a value of a configuration, as ("stages", 0, "steps")."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DuetError(Exception):
    """Base class. The message says what is wrong, where, and what to do."""

    exit_code = 1
    heading = "error"


class ConfigError(DuetError):
    """A missing configuration file, an invalid key or value, or an unknown name."""

    exit_code = 2
    heading = "error in the configuration"


class DataError(DuetError):
    """A malformed, incomplete or empty dataset, or a prompt that is too long."""

    exit_code = 3
    heading = "error in the data"


class ModelError(DuetError):
    """A model directory that cannot be read or contradicts its configuration, or a stage without
    any finite update."""

    exit_code = 4
    heading = "error in the model"


class ResourceError(DuetError):
    """Too few devices, too little memory or disk."""

    exit_code = 5
    heading = "not enough resources"


class RewardStop(DuetError):
    """A reward function failed and `rewards.on_error` is `stop`, or no completion of several steps
    has a score."""

    exit_code = 6
    heading = "stopped by a reward"


class ProcessLost(DuetError):
    """Another process of the run died, fell silent, or ended with an error that did not occur in
    this one.

    The run continues from its newest checkpoint when all processes start again.
    """

    exit_code = 76
    heading = "lost a process"


class Interrupted(DuetError):
    """The run was asked to stop. Its state is saved and it can continue (75 is EX_TEMPFAIL of
    sysexits.h)."""

    exit_code = 75
    heading = "interrupted"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a configuration, the data, a run or the machine, or a remark on it.

    text: what is wrong, with its numbers. change: what to type or to do. cause: the likely reason.
    level: how bad it is. severity: 0 to 1, among the faults of a run: a root cause has a higher one
    than what follows from it.

    Where it is: file, with the line, and key in a configuration; check, the number of a check of
    the data, or name, of the illness of a run (both as in docs/diagnose.md) or of a part of the
    machine; stage and step of a run, None if it concerns the full run.
    """

    text: str
    change: str = ""
    cause: str = ""
    level: Level = "refuse"
    severity: float = 0.5
    file: str = ""
    key: Key = ()
    check: int = 0
    name: str = ""
    stage: str | None = None
    step: int | None = None

    @property
    def place(self) -> str:
        """Where it is: `file:line: key`, `name (stage step N)`, or the parts of these that it
        has."""
        step = "" if self.step is None else f"step {self.step}"
        in_run = " ".join(filter(None, (self.stage, step)))
        if self.name and in_run:
            in_run = f"({in_run})"
        named = " ".join(filter(None, (self.name, in_run)))
        return ": ".join(filter(None, (self.file, ".".join(map(str, self.key)), named)))

    def message(self) -> str:
        """Returns the fault as text: `place: text. cause. change`, without the parts that it
        lacks."""
        sentences = ". ".join(filter(None, (self.text, self.cause, self.change)))
        return ": ".join(filter(None, (self.place, sentences)))


def no_room(error: BaseException) -> bool:
    """Tells whether an error reports a full disk or quota. Libraries raise their own errors with
    the system's text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)


def disk_room(folder: str | Path, needed: int = 0) -> str:
    """Returns what the file system of a folder has free, as text, and what is missing of `needed`
    bytes.

    A folder that does not exist is that of its nearest parent.
    """
    path = Path(folder).absolute()
    existing = next((each for each in (path, *path.parents) if each.exists()), path)
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return f"{path}: its free space cannot be read: {error.strerror}"
    has = f"{path} has {_size(free)} free"
    if not needed:
        return has
    return f"{has} of {_size(needed)} that are needed" + (
        f": {_size(needed - free)} are missing" * (needed > free)
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


@contextlib.contextmanager
def reward_errors() -> Iterator[None]:
    """Turns errors of the rewards into errors of the run."""
    try:
        yield
    except RewardFailed as error:
        raise RewardStop(str(error)) from None
    except RewardError as error:
        raise DataError(f"rewards: {error}") from None
