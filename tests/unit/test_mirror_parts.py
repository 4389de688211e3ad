"""Checkpoints of which two processes have the parts, without jax: what is in the remote folder after
a kill at every operation and after faults of one of them, and what processes of another number
fetch."""

import errno
import multiprocessing
import os
import shutil
import signal
import threading

import faulty_files
import numpy as np
import pytest
import remote_runs

from rl.remote.faults import RemoteError, Retries
from rl.remote.store import Store
from rl.run.manifest import CHECKPOINT_FOLDER, HOST, MANIFEST, PART, complete, examine, seal
from rl.run.mirror import requests
from rl.run.mirror.fetch import Damaged, fetch_copy
from rl.run.mirror.fetch_parts import PartFolder, fetch_needed, fetch_part
from rl.run.mirror.local_files import keep_staged
from rl.run.mirror.remote_run import RemoteRun, newest_with_needed
from rl.run.mirror.requests import Answers, Requests, Rounds

QUICK = Retries(tries=2, sleep=lambda seconds: None)
URL = "faulty://parts/run"
SHAPE = '{"chunks": [2, 3], "shape": [4, 3]}'


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(requests, "_LOOK_S", 0.002)
    faulty_files.clear()
    yield
    faulty_files.clear()


class Machines:
    """Two processes: the folders of both, and what sends their parts."""

    def __init__(self, place, url=URL, start="first"):
        self.run = place / "machine-0"
        self.other = place / "machine-1"
        self.start = start
        if not self.run.exists():
            remote_runs.start(self.run)
        store = Store(url, QUICK)
        store.write("LOCK", b'{"owner": "me"}')
        self.rounds = Rounds(start)
        self.leader = RemoteRun(store, self.run, 1, remote_runs.needed)
        self.leader.requests = Requests(store, self.rounds, 1, "me")
        self.follower = Answers(Store(url, QUICK), self.rounds, 1, self.other)
        names = [each for each in store.list() if each.endswith(MANIFEST)]
        self.leader.known = {name.split("/")[1] for name in names}

    def save(self, number: int, start_of_other: str | None = None) -> None:
        """Writes the parts of a checkpoint. start_of_other: which start of the run the part of the
        other process is of; None: this one."""
        remote_runs.step(self.run, number)
        for process, folder in enumerate((self.run, self.other)):
            target = folder / CHECKPOINT_FOLDER / f"{number:010d}"
            array = target / "arrays" / "w"
            array.mkdir(parents=True)
            (array / ".zarray").write_text(SHAPE)
            (array / f"{process}.0").write_text(f"{process} after {number}")
            (target / HOST).write_text('{"stage": 0, "step": 1}')
            start = (start_of_other if process else None) or self.start
            part = {"process": process, "processes": 2, "save": f"{start}-{number}"}
            seal(target, {"number": number, "arrays": {}, PART: part})

    def send(self) -> list[Exception]:
        """Sends the newest checkpoint. Returns the errors of both."""
        self.rounds.begin()
        for folder in (self.run, self.other):
            keep_staged(folder, newest_with_needed(folder, remote_runs.needed, part=True))
        errors = []

        def act(what):
            try:
                what()
            except Exception as error:
                errors.append(error)
                self.rounds.give_up(str(error))

        thread = threading.Thread(target=act, args=(self.follower.serve,))
        thread.start()
        act(self.leader.upload)
        thread.join()
        return errors


def fetched(url, place) -> tuple[int, dict[str, str]]:
    """Returns number and shards of the checkpoint that a machine with one process fetches."""
    shutil.rmtree(place, ignore_errors=True)
    fetch_copy(url, place, weights=True, retries=QUICK)
    [(number, path)] = complete(place / CHECKPOINT_FOLDER)
    assert examine(path)[1] == []
    return number, {each.name: each.read_text() for each in (path / "arrays/w").glob("?.0")}


def of(number: int) -> tuple[int, dict[str, str]]:
    return number, {f"{process}.0": f"{process} after {number}" for process in (0, 1)}


def test_parts_of_two_processes_are_one_checkpoint_in_the_remote_folder(tmp_path):
    machines = Machines(tmp_path)
    for number in (1, 2, 3):
        machines.save(number)
        assert machines.send() == []
        assert fetched(URL, tmp_path / "copy") == of(number)
    assert machines.send() == []  # nothing new
    assert machines.leader.requests is not None
    machines.leader.requests.clear()
    assert not [name for name in Store(URL).list() if name.startswith(".sending")]
    part = tmp_path / "machine-0" / CHECKPOINT_FOLDER / "0000000003"
    assert "process 0 of 2 only" in examine(part)[1][0]  # which one process refuses


def _send_until(death, machines: Machines) -> None:
    faulty_files.use(death)
    machines.send()


@pytest.mark.parametrize("death", [faulty_files.die, faulty_files.die_within])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(death, tmp_path):
    """Both processes die at once, with checkpoint 1 in the remote folder and 2 on the way. The
    next start sends other bytes as checkpoint 2."""
    url = f"faulty-disk://{tmp_path}/remote"
    results = set()
    for operation in range(1, 100, 2):
        for folder in ("remote", "one", "two"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        faulty_files.use()
        machines = Machines(tmp_path / "one", url)
        machines.save(1)
        assert machines.send() == []
        machines.save(2)

        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=_send_until, args=(death(operation), machines))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        (number, shards) = fetched(url, tmp_path / "copy")
        assert (number, shards) == of(number)
        results.add(number)
        if process.exitcode == 0:
            break
        shutil.copytree(tmp_path / "copy", tmp_path / "two" / "machine-0")
        machines = Machines(tmp_path / "two", url, start="second")
        shutil.rmtree(tmp_path / "two" / "machine-0" / CHECKPOINT_FOLDER)
        machines.save(2)
        assert machines.send() == []
        assert fetched(url, tmp_path / "copy") == of(2)
    assert results == {1, 2} and operation > 10


def test_a_fault_of_one_process_leaves_the_old_checkpoint_and_the_next_is_sent(tmp_path):
    machines = Machines(tmp_path)
    machines.save(1)
    assert machines.send() == []
    machines.save(2)

    def refuse(call):
        if call.path.endswith("/1.0"):
            raise OSError(errno.EACCES, "no permission")

    faulty_files.use(refuse)
    errors = machines.send()
    assert len(errors) == 2 and all(isinstance(each, RemoteError) for each in errors), errors
    assert fetched(URL, tmp_path / "copy") == of(1)
    faulty_files.use()
    machines.save(3)
    assert machines.send() == []
    assert fetched(URL, tmp_path / "copy") == of(3)


def test_parts_of_different_saves_are_no_checkpoint(tmp_path):
    machines = Machines(tmp_path)
    machines.save(1, start_of_other="second")
    errors = machines.send()
    assert "another checkpoint" in str(errors[0])
    assert not [name for name in Store(URL).list() if name.endswith(MANIFEST)]


def test_a_process_sends_nothing_when_the_lock_is_anothers(tmp_path):
    machines = Machines(tmp_path)
    machines.save(1)
    Store(URL).write("LOCK", b'{"owner": "somebody"}')
    errors = machines.send()
    assert any("no longer holds the lock" in str(each) for each in errors)
    assert not [name for name in Store(URL).list() if name.endswith("/1.0")]


class Sharding:
    """Of an array [4, 3], of which this process has these rows."""

    def __init__(self, *rows: slice):
        self.rows = rows

    def addressable_devices_indices_map(self, shape):
        return {n: (rows, slice(None)) for n, rows in enumerate(self.rows)}


class Array:
    shape = (4, 3)
    dtype = np.dtype(np.float32)

    def __init__(self, *rows: slice):
        self.sharding = Sharding(*rows)


def test_a_process_fetches_the_shards_that_it_needs_and_checks_them(tmp_path):
    machines = Machines(tmp_path)
    machines.save(1)
    assert machines.send() == []
    store = Store(URL, QUICK)
    name = "0000000001"
    parts = [PartFolder(tmp_path / f"new-{process}", process, 3) for process in range(3)]
    for each in parts:
        fetch_part(store, name, each)
        assert examine(each.checkpoint(name), part=True)[1] == []
    has = [sorted(file.name for file in each.checkpoint(name).rglob("?.0")) for each in parts]
    assert has == [["0.0"], ["1.0"], []]
    needed = {
        "first": ([slice(0, 1)], ["0.0"]),
        "second": ([slice(2, 4)], ["1.0"]),
        "both": ([slice(0, 1), slice(3, 4)], ["0.0", "1.0"]),
        "across": ([slice(1, 3)], ["0.0", "1.0"]),
    }
    for case, (rows, files) in needed.items():
        fetch_needed(store, name, parts[0], {"w": Array(*rows)}, tmp_path / case)  # type: ignore
        assert sorted(file.name for file in (tmp_path / case).rglob("?.0")) == files, case

    store.write(f"{CHECKPOINT_FOLDER}/{name}/arrays/w/1.0", b"1 after 7")
    fetch_part(store, name, parts[0])
    fetch_part(store, name, parts[1])  # has the right bytes
    shutil.rmtree(parts[1].path)
    with pytest.raises(Damaged, match=r"w/1\.0: its bytes changed"):
        fetch_part(store, name, parts[1])
    assert complete(parts[1].path / CHECKPOINT_FOLDER) == []
    with pytest.raises(RemoteError, match="go on from the checkpoint before"):
        fetch_needed(store, name, parts[0], {"w": Array(slice(2, 4))}, tmp_path / "x")  # type: ignore
