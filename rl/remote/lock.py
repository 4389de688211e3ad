"""The lock of a remote folder: an object LOCK that one run renews, and that expires without it.

It holds the owner, its machine, process and folder, and when it expires. It is written only over the
version that was read before (`Store.replace`): on Google Cloud Storage nobody can take it at the
same time. On file systems without such writes the object is read again after a pause, so that of
two runs that start within it the last one that wrote goes on.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.remote.faults import RemoteError
from rl.remote.store import Store, Versioned

LOCK = "LOCK"
_OWNER_FILE = ".remote-owner"
_LOOKS = 1.5
"""Renewals for which a lock that has expired is watched: clocks differ."""
_LONG_S = 86400.0
"""Seconds since the expiry after which a lock is not watched: no clock is that wrong."""
_LOG = logging.getLogger("duet.remote")


class LockHeld(RemoteError):
    """Another run holds the lock."""


@dataclass(frozen=True)
class Holder:
    """Content of a lock. owner: random text of the folder that holds it. machine: the start of the
    system and the namespace in which the process has its number. expires: Unix seconds."""

    owner: str
    host: str
    machine: str
    process: int
    folder: str
    expires: float

    def __str__(self) -> str:
        return f"the run in {self.folder} on {self.host} (process {self.process})"


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds: for which a lock holds without renewal, between renewals, between two looks at a
    lock of somebody else, and before a lock is read again where writes do not compare versions."""

    lease_s: float = 60.0
    renew_s: float = 10.0
    look_s: float = 1.0
    settle_s: float = 2.0


class Lock:
    """The lock of a store, between `acquire` and `release`; a thread renews it.

    The caller holds the lock of the local folder, so that a process which held this lock from the
    same folder on this machine is gone.
    """

    def __init__(self, store: Store, folder: Path, times: LeaseTimes = LeaseTimes()):
        """folder: of the run, which keeps the random text by which it knows its own lock."""
        self._store = store
        self._folder = folder
        self._times = times
        self.owner = _owner(folder)
        """The random text of the folder."""
        self._version: str | None = None
        self._expires = 0.0
        self._taken_by: Holder | None = None
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock. One of a process that is gone is taken once it has expired, which is
        waited for.

        Raises LockHeld, which names the other run, as soon as that has renewed its lock.
        """
        seen: Versioned | None = None
        began = time.monotonic()
        while True:
            present = self._store.read_versioned(LOCK)
            holder = None if present is None else holder_in(present.data)
            is_renewed = (
                seen is not None and present is not None and seen.version != present.version
            )
            watched = 0.0 if is_renewed else time.monotonic() - began
            free = holder is None or self._is_free(holder, watched)
            if free and self._write(None if present is None else present.version):
                break
            if holder is not None and not free:
                if is_renewed:
                    raise LockHeld(self._in_use(holder))
                if seen is None:
                    _LOG.warning(
                        "%s/%s is held by %s, which may be gone: waiting until it expires and is "
                        "not renewed, at most %.0f s",
                        self._store.url,
                        LOCK,
                        holder,
                        self._times.lease_s,
                    )
                seen = present
            time.sleep(self._times.look_s)
        self._thread = threading.Thread(target=self._keep, name="remote-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LockHeld if another run has taken the lock or it was released. Renews one that is
        about to expire."""
        if self._ended.is_set():
            raise LockHeld(f"run.remote: {self._store.url}: the run has ended")
        if self._taken_by is None and time.time() > self._expires - self._times.lease_s / 4:
            self.renew()
        if self._taken_by is not None:
            raise LockHeld(self._in_use(self._taken_by))

    def renew(self) -> None:
        """Writes a later time of expiry. Raises RemoteError."""
        with self._guard:
            if self._taken_by is not None or self._write(self._version):
                return
            present = self._store.read_versioned(LOCK)
            holder = None if present is None else holder_in(present.data)
            is_own = holder is None or self._is_own(holder)
            if not is_own or not self._write(None if present is None else present.version):
                self._taken_by = holder or self._own()

    def release(self) -> None:
        """Removes the lock, if it is still held."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            try:
                present = self._store.read_versioned(LOCK)
                if present is not None and present.version == self._version:
                    self._store.delete(LOCK)
            except RemoteError as error:
                _LOG.warning("the lock stays until it expires: %s", error)

    def _keep(self) -> None:
        while not self._ended.wait(self._times.renew_s):
            try:
                self.renew()
            except RemoteError as error:
                _LOG.warning("the lock was not renewed: %s", error)
            if self._taken_by is not None:
                return

    def _write(self, version: str | None) -> bool:
        """Writes the lock over this version. Returns whether this run now holds it."""
        content = self._own()
        data = json.dumps(asdict(content), indent=1).encode()
        is_new = self._version is None
        if not self._store.replace(LOCK, data, version):
            return False
        if is_new and not self._store.has_generations:
            time.sleep(self._times.settle_s)
        present = self._store.read_versioned(LOCK)
        if present is None or present.data != data:
            return False
        self._version = present.version
        self._expires = content.expires
        return True

    def _own(self) -> Holder:
        expires = time.time() + self._times.lease_s
        return Holder(
            self.owner,
            socket.gethostname(),
            _machine(),
            os.getpid(),
            str(self._folder.absolute()),
            expires,
        )

    def _is_own(self, holder: Holder) -> bool:
        """Tells whether a process with this folder wrote a lock. A copy of the folder has the same
        owner."""
        here = (self.owner, socket.gethostname(), str(self._folder.absolute()))
        return (holder.owner, holder.host, holder.folder) == here

    def _is_free(self, holder: Holder, watched: float) -> bool:
        """Tells whether a lock may be taken. watched: for how many seconds nobody has renewed it:
        by the clock of another machine it may not have expired."""
        if self._is_own(holder) or _is_dead(holder):
            return True
        expired = time.time() - holder.expires
        needed = _LOOKS * self._times.renew_s if expired > 0 else self._times.lease_s
        return expired > _LONG_S or watched > needed

    def _in_use(self, holder: Holder) -> str:
        left = max(holder.expires - time.time(), 0)
        return (
            f"run.remote: {self._store.url} is in use by {holder}, whose lock is renewed (it "
            f"expires in {left:.0f} s). Stop that run, or choose another run.remote"
        )


def holder_in(data: bytes) -> Holder | None:
    """Returns the content of a lock; None for content that no run wrote, which nobody renews."""
    try:
        values = json.loads(data)
        return Holder(
            str(values["owner"]),
            str(values["host"]),
            str(values["machine"]),
            int(values["process"]),
            str(values["folder"]),
            float(values["expires"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _machine() -> str:
    """Returns what is the same for processes that see each other's numbers; "" where the system does
    not say."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _is_dead(holder: Holder) -> bool:
    """Tells whether the process of a lock was on this machine and is gone."""
    if not holder.machine or holder.machine != _machine():
        return False
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _owner(folder: Path) -> str:
    """Returns the random text of a folder, which is made when it is first asked for."""
    file = folder / _OWNER_FILE
    try:
        return file.read_text(encoding="utf-8").strip() or _new_owner(file)
    except FileNotFoundError:
        return _new_owner(file)


def _new_owner(file: Path) -> str:
    owner = uuid.uuid4().hex
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{owner}\n", encoding="utf-8")
    return owner
