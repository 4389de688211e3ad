"""A run whose processes have folders of their own: each keeps and uploads its parts of checkpoints,
and the remote folder has all parts.

The processes agree in their main threads on the checkpoint that is uploaded next, when the upload
before it has ended everywhere (`Apart.ask`). Threads then send the parts; the first process writes
the manifest last. At the start all take the newest checkpoint that is complete in the remote
folder.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from policy.json_types import JsonObject
from policy.mesh import processes
from rl.cluster.folders import copy_to_all
from rl.cluster.launch import on_first, raise_on_all
from rl.errors import ResourceError
from rl.records.run_files import ATTEMPTS
from rl.remote.faults import RemoteError
from rl.remote.store import Store
from rl.run.folder import FolderLock
from rl.run.manifest import CHECKPOINT_FOLDER, MANIFEST, PART, complete, examine
from rl.run.mirror.fetch import Damaged, fetch_models, fetch_records, look, written_to
from rl.run.mirror.fetch_parts import PartFolder, fetch_needed, fetch_part
from rl.run.mirror.local_files import clear_staging, keep_staged, model_folders
from rl.run.mirror.mirror import RunMirror, Uploads
from rl.run.mirror.remote_run import Listing, newest_with_needed, save_of
from rl.run.mirror.requests import Answers, Rounds
from rl.run.resume import best
from rl.run.signals import StopSignal

if TYPE_CHECKING:
    from rl.run.arrays import ArrayOrShape

_LOOK_S = 0.5
_TOGETHER = ".together"
_LOG = logging.getLogger("duet.remote")


@dataclass(frozen=True)
class _State:
    """Of the uploads of a process. is_busy: an upload goes on. is_over: none will follow. failure:
    of the last one."""

    is_busy: bool
    is_over: bool
    failure: str


class Apart:
    """The parts of one process, and their uploads (`rl.run.mirror.parts.Parts`)."""

    def __init__(self, url: str, run: Path, keep: int):
        """run: the folder of the run on this machine. keep: as of `Checkpoints`. Raises ConfigError
        for a URL that cannot be used."""
        index = processes.index()
        path = run if index == 0 else run / f"process-{index}"
        self._run = run
        self._part = PartFolder(path, index, processes.count())
        self._token = processes.broadcast(uuid.uuid4().hex[:12])
        self._rounds = Rounds(self._token)
        self._store = Store(url)
        self._mirror = RunMirror(url, run, keep, best.named_by) if index == 0 else None
        self._answers = Answers(self._store, self._rounds, index, path)
        self._uploads = Uploads(url, path, self._serve)
        if self._mirror is not None:
            self._mirror.have_parts(self._rounds, self._part.processes - 1)
            self._uploads = self._mirror.uploads
        self._armed = False  # a checkpoint is being written that will be uploaded

    @property
    def folder(self) -> Path:
        """The folder of this process for its part of the run."""
        return self._part.path

    @contextmanager
    def entered(self, lock: FolderLock) -> Iterator[None]:
        """Holds the lock of this process's folder, and in the first process that of the remote
        folder, after the newest complete checkpoint has been taken. Call `end` before leaving without
        an error. Raises what `RunMirror` and `FolderLock` raise."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(lock)
                shutil.rmtree(self.folder / _TOGETHER, ignore_errors=True)

            raise_on_all(enter)
            on_first(partial(_enter, stack, self._mirror))
            try:
                if self._mirror is None:
                    clear_staging(self.folder)
                    self._uploads.start()
                self._begin()
                yield
            except BaseException:
                self._rounds.give_up("the run has ended before")
                raise

    def content(self, attempt: int) -> JsonObject:
        """Returns what the manifest of a part says of it. attempt: number of the save."""
        return {
            "process": self._part.process,
            "processes": self._part.processes,
            "save": f"{self._token}-{attempt}",
        }

    def ask(self) -> None:
        """Has the checkpoint that is written next uploaded, if all uploads before it have ended."""
        states = self._states()
        if any(each.is_busy for each in states):
            if processes.first():
                self._uploads.warn_if_slow()
        elif not any(each.is_over for each in states):
            self._begin_round()
            self._armed = True

    def written(self) -> None:
        """Called in the background when the part of a checkpoint has been written."""
        if not self._armed:
            return
        self._armed = False
        try:
            keep_staged(self.folder, newest_with_needed(self.folder, best.named_by, part=True))
        except OSError as error:
            self._uploads.failure = error
            return
        self._uploads.checkpoint_written()

    @contextmanager
    def put_together(self, number: int, requested: Mapping[str, ArrayOrShape]) -> Iterator[Path]:
        """Yields a folder with the files of a checkpoint that this process needs to read these
        arrays. Raises RemoteError."""
        name = f"{number:010d}"
        if not on_first(lambda: self._is_there(name)):
            self._send(number)
        folder = self.folder / _TOGETHER
        try:
            raise_on_all(lambda: self._fetch_needed(name, requested, folder))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def end(self) -> None:
        """Has the newest checkpoint uploaded, and returns in all processes when that is done, or
        has failed."""
        with StopSignal():
            self._settle()
            newest = self._newest_common()
            if not any(each.is_over for each in self._states()):
                self._begin_round()
                if newest is not None and not on_first(lambda: self._is_there(f"{newest:010d}")):
                    raise_on_all(lambda: self._stage(newest))
                self._uploads.begin_last_upload()
            while not all(each.is_over for each in self._states()):
                time.sleep(_LOOK_S)

    # Uploads.

    def _serve(self) -> None:
        self._answers.serve()

    def _states(self) -> list[_State]:
        """Returns the states of all processes. A process whose upload has failed ends the waits of
        the others."""
        uploads = self._uploads
        failure = "" if uploads.failure is None else str(uploads.failure)
        if self._armed:
            failure = "its part of the checkpoint has not been written"
        own = (uploads.is_busy, not uploads.is_at_work, failure)
        states = [_State(*each) for each in processes.all_gather_object(own)]
        for process, each in enumerate(states):
            if each.failure and not each.is_busy:
                self._rounds.give_up(f"process {process}: {each.failure}")
        return states

    def _begin_round(self) -> None:
        self._rounds.begin()
        self._uploads.failure = None
        self._armed = False

    def _settle(self) -> list[_State]:
        """Returns when no process uploads."""
        states = self._states()
        while any(each.is_busy for each in states):
            time.sleep(_LOOK_S)
            states = self._states()
        return states

    def _stage(self, number: int) -> None:
        with written_to(self.folder):
            names = newest_with_needed(self.folder, best.named_by, part=True, up_to=number)
            keep_staged(self.folder, names)

    def _send(self, number: int) -> None:
        """Uploads a checkpoint, and returns when it is there. Raises RemoteError."""
        self._settle()
        self._begin_round()
        raise_on_all(lambda: self._stage(number))
        self._uploads.checkpoint_written()
        for process, each in enumerate(self._settle()):
            if each.failure:
                raise RemoteError(f"process {process}: {each.failure}")

    def _is_there(self, name: str) -> bool:
        """Tells whether the remote folder has the checkpoint of this save."""
        folder = f"{CHECKPOINT_FOLDER}/{name}"
        try:
            there = json.loads(self._store.read(f"{folder}/{MANIFEST}"))
            here = json.loads((self.folder / folder / MANIFEST).read_bytes())
            return save_of(there) == save_of(here)
        except (OSError, ValueError, KeyError):
            return False

    def _fetch_needed(self, name: str, requested: Mapping[str, ArrayOrShape], folder: Path) -> None:
        with written_to(self.folder):
            fetch_needed(self._store, name, self._part, requested, folder)

    # The start.

    def _saves(self) -> dict[int, str]:
        """Returns the checkpoints of which this process has its part, by number: the save of each.
        A complete one has the save ""."""
        result = {}
        for number, path in complete(self.folder / CHECKPOINT_FOLDER):
            manifest, wrong = examine(path, hashes=False, part=True)
            if manifest is None or wrong or path.name != f"{number:010d}":
                continue
            part = manifest.get(PART)
            if part is None:
                result[number] = ""
            elif (part["process"], part["processes"]) == (
                self._part.process,
                self._part.processes,
            ):
                result[number] = part["save"]
        return result

    def _newest_common(self) -> int | None:
        """Returns the newest checkpoint whose parts all processes have, or of which the
        first one has all files."""
        first, *others = processes.all_gather_object(self._saves())
        return max(
            (
                number
                for number, save in first.items()
                if not save or all(each.get(number) == save for each in others)
            ),
            default=None,
        )

    def _begin(self) -> None:
        """Has all processes take the newest checkpoint that is complete there, once
        a newer one of which all have their parts has been sent."""
        names = on_first(self._look)
        newest = self._newest_common()
        if newest is not None and (not names or newest > int(names[0])):
            self._send(newest)
            names = on_first(self._look)
        taken = self._take_newest(names)
        for number, path in complete(self.folder / CHECKPOINT_FOLDER):
            if taken is None or number > int(taken) or not self._is_there(path.name):
                _LOG.warning("%s: the remote folder does not have it; removed", path)
                shutil.rmtree(path, ignore_errors=True)
        for folder in on_first(lambda: model_folders(self._run)):
            if not folder.startswith("export"):
                copy_to_all(self._run / folder)

    def _look(self) -> list[str]:
        """Returns the names of the checkpoints that are complete there, the newest
        first."""
        assert self._mirror is not None
        remote = self._mirror.remote
        return [each.name for each in look(remote, self._run).checkpoints() if not each.is_replaced]

    def _take_newest(self, names: list[str]) -> str | None:
        """Fetches the newest undamaged checkpoint of these, and returns its name; None: there are
        none. Raises RemoteError if all are damaged."""
        problems = []
        has_records = False
        for name in names:
            if not has_records:
                on_first(partial(self._fetch_records, int(name)))
            has_records = True
            problem = raise_on_all(partial(self._fetch_part, name))
            problems_now = [each for each in processes.all_gather_object(problem) if each]
            if not problems_now:
                return name
            problems += problems_now
            on_first(partial(self._mark_damaged, name, problems_now))
        if problems:
            lines = "\n".join(f"  {each}" for each in problems)
            raise RemoteError(
                f"run.remote: no checkpoint is undamaged:\n{lines}\nChoose another run.remote and "
                "run.dir for a new run, or restore these files"
            )
        if not (self._run / ATTEMPTS).exists():
            on_first(partial(self._fetch_records, 0))
        return None

    def _fetch_records(self, number: int) -> None:
        """Fetches records and folders with weights, unless the local ones are as new as the
        checkpoint with this number."""
        assert self._mirror is not None
        if any(each >= number for each in self._saves()):
            return
        remote = self._mirror.remote
        listing = Listing(remote.store.list())
        with written_to(self._run):
            fetch_records(remote, self._run, listing)
            fetch_models(remote, self._run, listing)

    def _fetch_part(self, name: str) -> str | None:
        """Fetches the part of this process. Returns what is wrong with the checkpoint, if anything
        is."""
        own = self._part.checkpoint(name)
        had = self._saves().get(int(name))
        try:
            with written_to(self.folder):
                fetch_part(self._store, name, self._part)
        except Damaged as error:
            return f"{self._store.url}/{CHECKPOINT_FOLDER}/{name}: {error}"
        if processes.first() and had is None:
            _LOG.warning("%s: checkpoint %d is fetched to %s", self._store.url, int(name), own)
        return None

    def _mark_damaged(self, name: str, problems: list[str]) -> None:
        assert self._mirror is not None
        self._mirror.remote.damaged.add(name)
        for each in problems:
            _LOG.warning("%s; passed over", each)


def _enter(stack: ExitStack, mirror: RunMirror | None) -> None:
    assert mirror is not None
    try:
        stack.enter_context(mirror)
    except OSError as error:
        raise ResourceError(f"run.dir: {error}") from None
