"""The directory of a run: one process at a time, one configuration from its first event on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from policy.mesh import processes
from rewards.text import quoted
from rl.cluster.folders import SHOWN_AFTER_S, copy_to_all
from rl.cluster.launch import on_first, raise_on_all
from rl.config import files
from rl.config.run import RunConfig
from rl.errors import ConfigError, ResourceError, disk_room, no_room
from rl.run.mirror.parts import Parts
from rl.run.resume.continued import check_same, continued, folder_state, saved
from rl.run.unfinished import stop

_LOOK_S = 0.1


class FolderLock:
    """Holds the lock of a run's directory while it is entered, and makes the directory."""

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def __enter__(self) -> FolderLock:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path / stop.LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            room = f" ({disk_room(self._path)})" if no_room(error) else ""
            raise ResourceError(
                f"run.dir: cannot write to {self._path}: {error.strerror}{room}"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.__exit__()
            raise ResourceError(stop.IN_USE.format(self._path)) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RunFolder:
    """Holds the lock of a run's directory while it is entered, and writes config.yml.

    Where there are events, it first checks that config.yml is of the same run, but for what may
    change (rl/run/resume/continued.py), and writes nothing before `begin`: a start that is refused
    leaves the run as it was.

    With several processes, which all see the directory, the first process does so for all. A run
    that stopped before its first event (a model that cannot be read) leaves nothing to protect:
    another configuration takes its place.
    """

    def __init__(
        self,
        config: RunConfig,
        before: tuple | None = None,
        lock: FolderLock | None = None,
        parts: Parts | None = None,
    ):
        """before: what `folder_state` returned when the changes of the configuration were made;
        None: it has not changed. lock: that of the directory, if the caller holds it. parts: of
        processes that do not all see the directory."""
        self.path = config.directory
        self._config = config
        self._before = before
        self._own_lock = FolderLock(self.path)
        self._lock = lock or self._own_lock
        self.parts = parts
        self._aside: stop.StoppedAt | None = None  # the place of an export that `begin` moves aside
        self._begun = False

    def __enter__(self) -> RunFolder:
        on_first(self._take)
        try:
            if self.parts is None:
                _check_shared(self.path)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _take(self) -> None:
        if not self._lock.is_held:
            self._own_lock.__enter__()
        try:
            stop.withdraw(self.path)
            self._claim()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_) -> None:
        if self._lock.is_held:
            with contextlib.suppress(OSError):
                stop.withdraw(self.path)
        self._own_lock.__exit__()

    @property
    def finished(self) -> bool:
        """Whether the run in this directory is complete."""
        return on_first(lambda: self._aside is None and self._exported.is_dir())

    def begin(self, steps_follow: bool = True) -> None:
        """Moves the export of a stopped run, or of one that gets more steps, aside, and writes
        config.yml; does so once. steps_follow: False if the last stage is over, so that config.yml
        stays as it is."""
        if not self._begun:
            on_first(lambda: self._begin(steps_follow))
            if self.parts is not None:
                self._copy_configuration()
        self._begun = True

    def export(
        self, write: Callable[[Path], None], size: int = 0, stopped: stop.StoppedAt | None = None
    ) -> Path:
        """Calls `write(directory)` to write the final weights. `export/` appears in one step: the
        run is finished, or it was stopped at this place.

        size: bytes of the weights, for the message of a full disk.
        """

        def write_all(directory: Path) -> None:
            write(directory)
            if stopped is not None and processes.first():
                stop.write_stopped(self.path, stopped)

        return self._in_one_step(self._exported, write_all, size)

    def write_once(self, directory: Path, write: Callable[[Path], None]) -> None:
        """Calls `write(directory)` to fill a directory, unless it exists. The directory appears in
        one step."""
        if not on_first(directory.is_dir):
            self._in_one_step(directory, write)
            self._share(directory)

    def write_anew(self, directory: Path, write: Callable[[Path], None], size: int = 0) -> None:
        """Calls `write(directory)` to fill a directory, in place of one that exists. The directory
        appears in one step. size: as in `export`."""
        on_first(lambda: shutil.rmtree(directory, ignore_errors=True))
        self._in_one_step(directory, write, size)
        self._share(directory)

    def _share(self, directory: Path) -> None:
        if self.parts is not None:
            copy_to_all(directory)

    def _in_one_step(self, directory: Path, write: Callable[[Path], None], size: int = 0) -> Path:
        """Calls `write` in every process. Returns when the directory is there."""
        unfinished = directory.with_name(f"{directory.name}.tmp")
        if processes.first():
            self._write(directory, unfinished, write, size)
        else:
            write(unfinished)
        processes.broadcast(None)  # it is there
        if self.parts is not None:  # of a copy that was read back
            shutil.rmtree(unfinished, ignore_errors=True)
        return directory

    def _write(
        self, directory: Path, unfinished: Path, write: Callable[[Path], None], size: int
    ) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            directory.parent.mkdir(exist_ok=True)
            write(unfinished)
            unfinished.rename(directory)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not (isinstance(error, (OSError, SafetensorError)) or no_room(error)):
                raise
            room = disk_room(directory.parent, size)
            raise ResourceError(
                f"{directory}: the final weights cannot be written: {error}. Make room, then "
                f"`rl-train {quoted(self.path)}` ({room})"
            ) from None

    @property
    def _exported(self) -> Path:
        return self.path / "export"

    def _claim(self) -> None:
        unchanged = self._config.model_copy(update={"changes": []})
        self._aside = stop.stopped(self.path)
        if (before := saved(self.path)) is None:
            self._begin()
            return
        meanwhile = self._before is not None and folder_state(self.path) != self._before
        if meanwhile and continued(unchanged, locked=True).changes != self._config.changes:
            raise ResourceError(
                f"{self.path}: another process has started or continued this run in the meantime; "
                f"start again with `rl-train {quoted(self.path)}`"
            )
        check_same(before, unchanged)
        if (
            self._aside is None
            and self._config.stages[-1].total_steps > before.stages[-1].total_steps
        ):
            self._aside = stop.StoppedAt(before.stage_names[-1], before.stages[-1].total_steps)

    def _begin(self, steps_follow: bool = True) -> None:
        if self._aside is not None:
            self._keep_export(self._aside)
        self._aside = None
        (self.path / stop.STOPPED).unlink(missing_ok=True)
        if steps_follow:
            self._write_configuration(files.resolved_yaml(self._config))

    def _copy_configuration(self) -> None:
        """Writes config.yml in the processes that do not see that of the first one, so that
        `rl-train RUN` goes on there too."""
        file = self.path / files.RESOLVED
        text = processes.broadcast(file.read_text() if processes.first() else None)
        if not file.exists() or file.read_text() != text:
            self._write_configuration(text)

    def _write_configuration(self, text: str) -> None:
        file = self.path / files.RESOLVED
        temporary = file.with_suffix(".yml.tmp")
        try:
            temporary.write_text(text)
            temporary.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ResourceError(
                f"{file} cannot be written: {error.strerror}. Make room, then start the run again "
                f"({disk_room(self.path)})"
            ) from None

    def _keep_export(self, place: stop.StoppedAt) -> None:
        """Moves the weights of a shorter run, or of a stopped one, aside: the run is not finished
        any more."""
        if self._exported.is_dir():
            kept = self.path / f"export-{place.stage}-{place.step}"
            shutil.rmtree(kept, ignore_errors=True)  # of an earlier stop at this step
            self._exported.rename(kept)


def _check_shared(path: Path) -> None:
    """Raises ConfigError on all processes unless all of them see the directory of the first one."""
    if processes.count() == 1:
        return
    name = f".seen-{processes.broadcast(uuid.uuid4().hex[:8])}"
    on_first((path / name).touch)
    try:
        raise_on_all(lambda: wait_for_file(path / name))
    finally:
        if processes.first():
            (path / name).unlink(missing_ok=True)


def wait_for_file(file: Path, seconds: float = SHOWN_AFTER_S) -> None:
    """Returns when this process sees a file that the first process has written. Raises
    ConfigError."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"run.dir: process {processes.index()} on {socket.gethostname()} does not see the "
                f"{file.parent} of the first process; name a folder that all processes share, or "
                "set run.remote"
            )
        time.sleep(_LOOK_S)
