"""How processes with folders of their own send one checkpoint: the first one asks, and the others
answer when their files are there, with the list of them.

Request and answers are objects of the remote folder, below `.sending/`. The first process holds the
lock of the remote folder, and asks once it has made way for the checkpoint, so nobody else writes to
its folder.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.remote.faults import RemoteError
from rl.remote.lock import LOCK
from rl.remote.store import Store
from rl.run.manifest import CHECKPOINT_FOLDER, MANIFEST, PART
from rl.run.mirror.local_files import clear_staging, kept

WRITER = "process"
"""Key of a file in a manifest: the process that wrote it."""
_FOLDER = ".sending"
_REQUEST = f"{_FOLDER}/request.json"
_LOOK_S = 0.5
_CHECK_LOCK_S = 5.0


@dataclass(frozen=True)
class _Request:
    """round: of uploads, by the name of the run and its number. turn: number of the request in the
    round. checkpoint: the name of its folder; None: the round is over. owner: of the lock."""

    round: str
    turn: int
    checkpoint: str | None
    owner: str


def _answer(process: int) -> str:
    return f"{_FOLDER}/process-{process}.json"


class Rounds:
    """The round of uploads that goes on, by which requests and answers are known. `give_up` has the
    waits in it raise RemoteError with a reason."""

    def __init__(self, run: str):
        """run: text that differs between starts of the run."""
        self._run = run
        self._number = 0
        self._reason: str | None = None

    @property
    def name(self) -> str:
        """The name of the round."""
        return f"{self._run}-{self._number}"

    def begin(self) -> None:
        """Begins the next round."""
        self._reason = None
        self._number += 1

    def give_up(self, reason: str) -> None:
        """Ends the waits of this round."""
        self._reason = reason

    def wait(self) -> None:
        """Waits a moment. Raises RemoteError if the round was given up."""
        time.sleep(_LOOK_S)
        if self._reason is not None:
            raise RemoteError(self._reason)


class Requests:
    """What the first process asks of the others."""

    def __init__(self, store: Store, rounds: Rounds, others: int, owner: str):
        """others: how many other processes there are. owner: of the lock."""
        self._store = store
        self._rounds = rounds
        self._others = others
        self._owner = owner
        self._turn = 0

    def ask(self, checkpoint: str) -> None:
        """Has the others send their part of a checkpoint, by the name of its folder."""
        self._ask(checkpoint)

    def end(self) -> None:
        """Tells the others that nothing is asked any more in this round."""
        self._ask(None)

    def answers(self, save: str) -> dict[int, dict[str, Any]]:
        """Returns the files that each of the others has sent, once all have: size and SHA-256 by
        name. save: of the parts. Raises RemoteError."""
        result = {}
        for process in range(1, self._others + 1):
            while (answer := self._answer(process)) is None:
                self._rounds.wait()
            if answer["save"] != save:
                raise RemoteError(f"process {process} has sent the part of another checkpoint")
            result[process] = answer["files"]
        return result

    def clear(self) -> None:
        """Removes request and answers, once no process waits for one. Raises RemoteError."""
        answers = [_answer(process) for process in range(1, self._others + 1)]
        self._store.delete_all([_REQUEST, *answers])

    def _ask(self, checkpoint: str | None) -> None:
        self._turn += 1
        request = _Request(self._rounds.name, self._turn, checkpoint, self._owner)
        self._store.write(_REQUEST, json.dumps(asdict(request)).encode())

    def _answer(self, process: int) -> dict[str, Any] | None:
        value = _read(self._store, _answer(process))
        is_new = value.get("round") == self._rounds.name and value.get("turn") == self._turn
        return value if is_new else None


class Answers:
    """Sends the part of one process when the first one asks for it."""

    def __init__(self, store: Store, rounds: Rounds, process: int, folder: Path):
        """folder: with the parts of this process."""
        self._store = store
        self._rounds = rounds
        self._process = process
        self._folder = folder
        self._guard = threading.Lock()
        self._checked = float("-inf")  # when the lock was last read

    def serve(self) -> None:
        """Answers until the round is over. Raises RemoteError."""
        turn = 0
        try:
            while (request := self._next(turn)).checkpoint is not None:
                turn = request.turn
                self._send(request, request.checkpoint)
        finally:
            clear_staging(self._folder)

    def _next(self, turn: int) -> _Request:
        while True:
            value = _read(self._store, _REQUEST)
            if value.get("round") == self._rounds.name and value["turn"] > turn:
                return _Request(**value)
            self._rounds.wait()

    def _send(self, request: _Request, name: str) -> None:
        source = kept(self._folder, name)
        manifest = json.loads((source / MANIFEST).read_bytes())
        check = self._checks(request.owner)

        def put(file: str) -> None:
            check()
            self._store.put(source / file, f"{CHECKPOINT_FOLDER}/{name}/{file}")

        files = _shards(manifest["files"])
        self._store.for_each(put, files)
        answer = {
            "round": request.round,
            "turn": request.turn,
            "save": manifest[PART]["save"],
            "files": files,
        }
        self._store.write(_answer(self._process), json.dumps(answer).encode())

    def _checks(self, owner: str) -> Callable[[], None]:
        """Returns what raises RemoteError when the run has lost its lock."""

        def check() -> None:
            with self._guard:
                if time.monotonic() - self._checked < _CHECK_LOCK_S:
                    return
                if _read(self._store, LOCK).get("owner") != owner:
                    raise RemoteError(f"{self._store.url}: the run no longer holds the lock")
                self._checked = time.monotonic()

        return check


def _shards(files: dict[str, Any]) -> dict[str, Any]:
    """Returns the files of a part that the first process lacks: those with numbers of an array."""
    return {name: facts for name, facts in files.items() if is_shard(name)}


def is_shard(name: str) -> bool:
    """Tells whether a file of a checkpoint holds numbers of an array, and neither its shape nor a
    list of arrays: its name is a place in the array, as `0.3`."""
    return all(each.isdecimal() for each in name.rpartition("/")[2].split("."))


def _read(store: Store, name: str) -> dict[str, Any]:
    """Returns an object; nothing for one that is absent or no JSON object."""
    try:
        value = json.loads(store.read(name))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
