"""The errors that end a run in a known way, each with the exit code of the command line.

The command line prints one of these as plain text and exits with its code; any other exception is a bug, shows its
traceback and exits 1.
"""

from __future__ import annotations

import errno
import os

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DuetError(Exception):
    """Base class. The text of an instance says what is wrong, where, and how to mend it."""

    exit_code = 1
    heading = "error"


class ConfigError(DuetError):
    """A missing configuration file, a bad key or value, a name that nothing answers to."""

    exit_code = 2
    heading = "error in the configuration"


class DataError(DuetError):
    """A malformed, incomplete or empty dataset, or a prompt that does not fit."""

    exit_code = 3
    heading = "error in the data"


class ModelError(DuetError):
    """A model directory that cannot be read or that disagrees with its configuration, or a stage without one finite update."""

    exit_code = 4
    heading = "error in the model"


class ResourceError(DuetError):
    """Too few devices, too little memory or disk."""

    exit_code = 5
    heading = "not enough resources"


class RewardStop(DuetError):
    """A reward function failed and the configuration says `on_error: stop`."""

    exit_code = 6
    heading = "stopped by a reward"


class ProcessLost(DuetError):
    """Another process of the run has died or fallen silent, or has ended by an error that this one did not find. Started again, all
    together, the run goes on from its newest checkpoint."""

    exit_code = 76
    heading = "lost a process"


class Interrupted(DuetError):
    """The run was asked to stop, has saved its state, and can be continued (75 is EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75
    heading = "interrupted"


def no_room(error: BaseException) -> bool:
    """Tells whether an error says that a disk or a quota is full. Libraries raise errors of their own that quote the system's."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)
