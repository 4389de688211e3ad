"""Defines the errors that end a run in a known way, each with its exit code.

The command line prints such an error as plain text and exits with its code. Any other exception is
a bug: Python shows its traceback and exits with code 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rewards.registry import RewardError, RewardFailed

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
