"""The mirror of a run while it goes on: a thread that uploads after each checkpoint, and the lock of
the remote folder.

There is no list of uploads to wait for: the thread makes the remote folder like the local one, and
begins again if a checkpoint was written meanwhile. If uploads are slower than checkpoints, some
checkpoints are never sent, and a warning says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from rewards.text import quoted
from rl.errors import ConfigError, DuetError, ResourceError, disk_room, no_room
from rl.remote.faults import RemoteError, Retries
from rl.remote.lock import LeaseTimes, Lock, LockHeld
from rl.remote.store import Store
from rl.run.mirror.fetch import fetch
from rl.run.mirror.local_files import clear_staging
from rl.run.mirror.remote_run import RemoteRun
from rl.run.mirror.requests import Requests, Rounds
from rl.run.signals import StopSignal

_LOG = logging.getLogger("duet.remote")
_TRIES = 4
_SHOW_WAIT_S = 60.0
_WARN_EVERY_S = 600.0
"""Seconds between warnings that uploads are slower than checkpoints."""


class Uploads:
    """Uploads in a thread: after each checkpoint, and at the end."""

    def __init__(self, url: str, run: Path, send: Callable[[], int | None]):
        """send: uploads, and returns the number of the newest checkpoint there, if it knows it. It
        raises RemoteError, and LockHeld to end the uploads."""
        self._url = url
        self._run = run
        self._send = send
        self._wake = threading.Event()
        self._ending = threading.Event()
        self.failure: Exception | None = None
        """Of the last upload."""
        self._asked = 0  # uploads
        self._made = 0  # of those that were asked for
        self._began: float | None = None  # when the upload that is under way began
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def checkpoint_written(self) -> None:
        """Has the run uploaded. Returns at once."""
        self.warn_if_slow()
        self._ask()

    def warn_if_slow(self) -> None:
        """Says that an upload is still going on, now and then."""
        began = self._began
        if began is not None and time.monotonic() - self._warned > _WARN_EVERY_S:
            self._warned = time.monotonic()
            _LOG.warning(
                "run.remote: a checkpoint was written, and the upload before it to %s has been "
                "going on for %.0f s. Uploads that are slower than checkpoints leave some out; "
                "raise run.checkpoint_every",
                self._url,
                time.monotonic() - began,
            )

    @property
    def is_busy(self) -> bool:
        """Whether an upload that was asked for has not been made."""
        return self._made != self._asked and self._thread.is_alive()

    @property
    def is_at_work(self) -> bool:
        """Whether there is an upload to come, until the last one has been made."""
        return self._thread.is_alive()

    def begin_last_upload(self) -> None:
        """Has everything uploaded that there is now. Nothing is uploaded after it."""
        self._ending.set()
        self._ask()

    def finish(self) -> None:
        """Waits for the last upload. A signal to stop does not end the wait; the second Ctrl-C
        does."""
        self.begin_last_upload()
        with StopSignal():
            self._thread.join(1.0)
            began = time.monotonic()
            shown = float("-inf")
            while self._thread.is_alive():
                if time.monotonic() - shown > _SHOW_WAIT_S:
                    shown = time.monotonic()
                    waited = f" ({shown - began:.0f} s so far)" if shown - began > 1 else ""
                    _LOG.warning("waiting for the upload to %s%s", self._url, waited)
                self._thread.join(0.2)

    def problem(self) -> str | None:
        """Returns what to say of a last upload that failed; None: it did not."""
        if self.failure is None:
            return None
        return (
            f"run.remote: {self._url} lacks the last changes of the run: {self.failure}. "
            f"They are safe in {self._run}; `rl-train {quoted(self._run)}` sends them"
        )

    def _ask(self) -> None:
        self._asked += 1
        self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            asked = self._asked
            is_last = self._ending.is_set()
            self._upload()
            self._made = asked
            if isinstance(self.failure, LockHeld) or is_last:
                return

    def _upload(self) -> None:
        self._began = time.monotonic()
        try:
            number = self._send()
            self.failure = None
            if number is not None:
                _LOG.info("%s has checkpoint %s", self._url, number)
        except DuetError as error:
            self.failure = error
            _LOG.error(
                "NOT uploaded: %s. The run goes on, and the next checkpoint tries again", error
            )
        except OSError as error:  # of the local disk
            room = f" ({disk_room(self._run)})" if no_room(error) else ""
            self.failure = ResourceError(f"{error}{room}")
            _LOG.error("NOT uploaded: %s. The next checkpoint tries again", self.failure)
        except Exception as error:  # the run goes on in any case; the end of the run shows it
            self.failure = error
            _LOG.exception("NOT uploaded to %s", self._url)
        finally:
            self._began = None


class RunMirror:
    """Keeps a remote folder like the folder of a run while it is entered.

    Entering takes the lock of the remote folder and fetches what is newer there. Leaving waits for
    the last upload, and raises RemoteError if that fails and nothing else has ended the run; the
    local folder is complete then. The caller holds the lock of the local folder.
    """

    def __init__(
        self,
        url: str,
        run: Path,
        keep: int,
        needed: Callable[[dict], Iterable[int]] = lambda host: (),
        retries: Retries = Retries(),
        times: LeaseTimes = LeaseTimes(),
    ):
        """keep, needed: as of `Checkpoints`. Raises ConfigError for a URL that cannot be used."""
        self._run = run
        self._store = Store(url, retries)
        self._lock = Lock(self._store, run, times)
        self.remote = RemoteRun(self._store, run, keep, needed, self._lock.check)
        self.uploads = Uploads(self._store.url, run, self._send)

    def have_parts(self, rounds: Rounds, others: int) -> None:
        """Has this run ask so many other processes for their parts of its checkpoints. Call it
        before entering; what is newer in the remote folder is not fetched then."""
        self.remote.requests = Requests(self._store, rounds, others, self._lock.owner)

    def __enter__(self) -> RunMirror:
        try:
            self._lock.acquire()
        except FileNotFoundError as error:
            raise ConfigError(f"run.remote: {self._store.url}: no such bucket ({error})") from None
        try:
            clear_staging(self._run)
            self._store.remove_parts()
            if self.remote.requests is None:
                fetch(self.remote, self._run)
        except BaseException:
            self._lock.release()
            raise
        self.uploads.start()
        return self

    def checkpoint_written(self) -> None:
        """Has the run uploaded. Returns at once."""
        self.uploads.checkpoint_written()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        at_once = kind is not None and issubclass(kind, (KeyboardInterrupt, GeneratorExit))
        try:
            if not at_once:
                self.uploads.finish()
                self._clear_requests()
        finally:
            self._lock.release()
        text = self.uploads.problem()
        if text is None or at_once:
            return
        if kind is None:
            raise RemoteError(text)
        _LOG.error("%s", text)

    def _clear_requests(self) -> None:
        if self.remote.requests is None or self.uploads.failure is not None:
            return
        try:
            self.remote.requests.clear()
        except RemoteError as error:
            _LOG.warning("requests to other processes stay: %s", error)

    def _send(self) -> int | None:
        """Uploads. Begins again if the run has replaced or removed what was to be sent."""
        gone: FileNotFoundError | None = None
        for _ in range(_TRIES if self.remote.requests is None else 1):
            try:
                return self.remote.upload()
            except FileNotFoundError as error:
                gone = error
                _LOG.info("%s is gone; the upload begins again", error)
        raise RemoteError(f"{self._store.url}: {gone} is gone")
