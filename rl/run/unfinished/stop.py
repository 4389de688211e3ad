"""Files in the folder of a run by which other processes see whether it is running, and ask it to
stop. Imports no jax.

The run holds a lock on LOCK. It looks for REQUEST after each step, and removes it at its start and
at its end. STOPPED says that `export/` holds the weights of a run that was stopped before its end;
the next start moves that folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

LOCK = ".lock"
REQUEST = "stop.request"
STOPPED = "stopped.json"
IN_USE = "{} is in use by another process; choose another run.dir"


class StoppedAt(NamedTuple):
    """The last step of a run that was stopped, and the name of its stage."""

    stage: str
    step: int


def in_use(run: Path) -> bool:
    """Returns whether a process holds the lock of the run, as far as this machine sees it."""
    try:
        lock = os.open(run / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def ask(run: Path) -> None:
    """Asks the run to stop after its step. Raises OSError."""
    (run / REQUEST).touch()


def is_asked(run: Path) -> bool:
    """Returns whether the run is asked to stop."""
    return (run / REQUEST).exists()


def withdraw(run: Path) -> None:
    """Removes the request to stop, if there is one."""
    (run / REQUEST).unlink(missing_ok=True)


def write_stopped(run: Path, place: StoppedAt) -> None:
    """Records where the run was stopped, before its export appears. Raises OSError."""
    (run / STOPPED).write_text(json.dumps(place._asdict()) + "\n")


def stopped(run: Path) -> StoppedAt | None:
    """Returns where the run was stopped; None for another run."""
    try:
        values = json.loads((run / STOPPED).read_text())
        return StoppedAt(str(values["stage"]), int(values["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
