"""Appends to a file whose data wait in memory while the disk is full."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from rl.errors import disk_room

_LOG = logging.getLogger("duet.events")


class AppendFile:
    """A file that only grows, until it is cut.

    Data are written at once. A killed process leaves at most a part of its last write.
    """

    def __init__(self, path: Path):
        """Opens the file, and creates it if it does not exist. Raises OSError."""
        self.path = path
        self._waiting = b""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @property
    def size(self) -> int:
        """Bytes of the file, those that wait in memory included."""
        return os.fstat(self._file).st_size + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Bytes that wait in memory for room on the disk."""
        return len(self._waiting)

    def hold(self, data: bytes) -> None:
        """Keeps data in memory for the next call that writes."""
        self._waiting += data

    def append(self, data: bytes) -> None:
        """Writes data. On a full disk they wait for the next call; the first such call logs an
        error."""
        waited = bool(self._waiting)
        self._waiting += data
        try:
            self._flush()
        except OSError as error:
            if not waited:
                room = disk_room(self.path.parent, len(self._waiting))
                _LOG.error(
                    "%s cannot be written: %s. Its lines are kept in memory; make room (%s)",
                    self.path,
                    error,
                    room,
                )

    def sync(self) -> None:
        """Writes all data to the disk and waits for it. Raises OSError."""
        self._flush()
        os.fsync(self._file)

    def cut(self, size: int) -> None:
        """Removes everything after the first `size` bytes, and data that wait. Raises OSError."""
        self._waiting = b""
        os.ftruncate(self._file, size)
        os.fsync(self._file)

    def reopen(self) -> None:
        """Opens the path again, after another file has taken its place or it was moved away. Raises
        OSError."""
        old = self._file
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _close(old)

    def close(self) -> None:
        """Writes the data that wait, if there is room."""
        with contextlib.suppress(OSError):
            self._flush()
        _close(self._file)

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]


def _close(file: int) -> None:
    with contextlib.suppress(
        OSError
    ):  # an error of a full disk has been reported by the write or sync
        os.close(file)
