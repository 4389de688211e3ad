"""Objects below a URL: writes that arrive completely or not at all, retries, errors that say what to do, and
the lock of a remote folder."""

import errno
import ftplib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import faulty_files
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rl.errors import ConfigError, ResourceError
from rl.remote import lock as lock_module
from rl.remote.faults import RemoteError, Retries, is_transient, shown
from rl.remote.lock import LOCK, LeaseTimes, Lock, LockHeld
from rl.remote.store import Store
from rl.remote.urls import is_remote, place_of, problem_of, scheme_of

QUICK = Retries(tries=4, sleep=lambda seconds: None)
TIMES = LeaseTimes(lease_s=0.6, renew_s=0.1, look_s=0.02, settle_s=0.0)
SERVICE_BUSY = OSError(errno.EIO, "the service is busy")


@pytest.fixture(autouse=True)
def _clean():
    faulty_files.clear()
    yield
    faulty_files.clear()


@pytest.fixture(params=["memory", "faulty", "file", "faulty-disk"])
def url(request, tmp_path):
    """A folder on each file system that the tests have."""
    place = tmp_path / "remote" if "memory" not in request.param else "bucket/run"
    if request.param == "faulty":
        place = "bucket/run"
    yield f"{request.param}://{place}"
    MemoryFileSystem.store.clear()


def store(url="faulty://bucket/run", retries=QUICK):
    return Store(url, retries)


def test_objects_are_written_listed_read_copied_and_removed(url, tmp_path):
    files = store(url)
    (tmp_path / "local").write_bytes(b"seven77")
    files.put(tmp_path / "local", "a/b/one")
    files.write("a/two", b"2")
    assert {name: facts.size for name, facts in files.list().items()} == {"a/b/one": 7, "a/two": 1}
    assert set(files.list("a/b")) == {"a/b/one"} and files.list("absent") == {}
    files.copy("a/b/one", "c/three")
    files.get("c/three", tmp_path / "new" / "three")
    assert (tmp_path / "new" / "three").read_bytes() == b"seven77" == files.read("a/b/one")
    files.delete("a/two")
    files.delete("a/two")
    assert files.facts("a/two") is None and files.is_file("c/three") and not files.is_file("a")
    with pytest.raises(FileNotFoundError):
        files.read("a/two")
    files.delete_all(files.list())
    assert files.list() == {}


def test_a_fault_that_passes_is_tried_again_and_one_that_does_not_is_named(tmp_path):
    (tmp_path / "local").write_bytes(b"x" * 100)
    for act in (faulty_files.fail(SERVICE_BUSY, 1, 2), faulty_files.truncate(1, 2)):
        log = faulty_files.use(act).log
        store().put(tmp_path / "local", "one")
        assert len(log) == 3 and store().read("one") == b"x" * 100
    faulty_files.use(faulty_files.fail(SERVICE_BUSY))
    with pytest.raises(RemoteError, match=r"writing faulty://bucket/run/two: .*busy.*4 times"):
        store().put(tmp_path / "local", "two")
    log = faulty_files.use(faulty_files.fail(PermissionError(errno.EACCES, "Forbidden"))).log
    with pytest.raises(RemoteError, match="writing .*two: PermissionError: Forbidden"):
        store().put(tmp_path / "local", "two")
    assert len(log) == 1


@pytest.mark.parametrize("scheme", ["faulty", "faulty-disk"])
def test_a_listing_that_fails_in_part_is_no_shorter_listing(scheme, tmp_path):
    """`find` of fsspec leaves out folders that cannot be read, so that a run would seem to be
    absent."""
    files = store(f"{scheme}://{tmp_path}/remote")
    names = {"a/one", "a/b/two", "three"}
    for name in names:
        files.write(name, b"1")
    for number in range(1, 9):
        faulty_files.use(faulty_files.fail(SERVICE_BUSY, number), names=faulty_files.READS)
        assert set(files.list()) == names, number
    faulty_files.use(faulty_files.fail(SERVICE_BUSY), names=faulty_files.READS)
    with pytest.raises(RemoteError, match="busy"):
        files.list()


def test_the_first_error_of_many_calls_leaves_the_others_out():
    begun = []

    def act(value):
        begun.append(value)
        time.sleep(0.01)
        raise RemoteError(f"{value}")

    with pytest.raises(RemoteError):
        store().for_each(act, range(200))
    assert len(begun) < 100
    done = []
    store().for_each(done.append, range(200))
    assert sorted(done) == list(range(200))


def test_waits_between_tries_grow_and_have_a_bound():
    waits = []
    retries = Retries(tries=9, sleep=waits.append)
    with pytest.raises(RemoteError):
        retries.call("x", lambda: (_ for _ in ()).throw(TimeoutError()))
    assert len(waits) == 8 and waits[0] <= 1 and 2 <= waits[2] <= 4
    assert all(15 <= each <= 30 for each in waits[5:])


class _Http(Exception):
    def __init__(self, code):
        self.code = code


def test_faults_of_services_are_told_apart_by_their_status():
    passing = [408, 429, 500, 502, 503, 504, "503"]
    assert all(is_transient(_Http(code)) for code in passing)
    assert not any(is_transient(_Http(code)) for code in (400, 401, 403, 404, 412))
    assert is_transient(ConnectionResetError()) and is_transient(TimeoutError())
    assert not is_transient(OSError(errno.ENOSPC, "full"))
    assert not is_transient(PermissionError())


def test_a_write_that_is_cut_off_leaves_the_old_object(tmp_path):
    """On a file system with folders a file shows while it is written, so another name is used."""
    files = store(f"file://{tmp_path}/remote")
    files.write("one", b"old")
    code = (
        "import os, sys\n"
        "from rl.remote.store import Store\n"
        "files = Store(sys.argv[1])\n"
        "files._rename = lambda source, target: os._exit(9)\n"
        "files.write('one', b'new and longer')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, files.url], timeout=60)
    assert ended.returncode == 9 and files.read("one") == b"old" and set(files.list()) == {"one"}
    assert len(os.listdir(tmp_path / "remote")) == 2
    files.remove_parts()
    assert os.listdir(tmp_path / "remote") == ["one"]


def test_urls_are_checked_without_importing_a_client():
    assert scheme_of("gs://b/x") == "gs" and scheme_of("runs/x") is None
    assert is_remote("s3://b") and not is_remote("hf://org/name") and not is_remote("C:/x")
    assert problem_of("memory://bucket/run") is None and problem_of("file:///tmp/x") is None
    assert "nearest: s3" in problem_of("s4://bucket/run")
    assert "names no folder" in problem_of("gs://")
    assert "is no URL" in problem_of("runs/x")
    said = problem_of("s3://me:hush@bucket/run")
    assert "AWS_ACCESS_KEY_ID" in said and "hush" not in said


@pytest.mark.parametrize(
    ("scheme", "module", "install"),
    [
        ("gs", "gcsfs", "pip install 'duet-rl[gcs]'"),
        ("s3", "s3fs", "pip install s3fs"),
        ("abfs", "adlfs", "pip install adlfs"),
    ],
)
def test_a_scheme_without_its_client_names_the_package(monkeypatch, scheme, module, install):
    from importlib import util

    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(ConfigError, match=r"needs a package") as raised:
        Store(f"{scheme}://bucket/run")
    assert install in str(raised.value)


def test_a_client_connects_to_the_host_of_its_url(monkeypatch):
    from fsspec.implementations.ftp import FTPFileSystem

    monkeypatch.setattr(FTPFileSystem, "_connect", lambda self: None)
    monkeypatch.setattr(FTPFileSystem, "ftp", ftplib.FTP(), raising=False)  # not connected
    place = place_of("ftp://me@host:2121/folder/run/")
    assert isinstance(place.files, FTPFileSystem)
    assert (place.files.host, place.files.port, place.path) == ("host", 2121, "/folder/run")


def test_no_credential_reaches_a_message():
    """Of a URL, and of the messages of clients, which have URLs and headers in them."""
    for url in (
        "sftp://user:pass/word@host/folder",
        "https://host/rows.jsonl?X-Amz-Signature=abc",
        "https://host/rows.jsonl?sv=1&sig=abc%3D",
    ):
        problem = problem_of(url)
        assert problem is not None and "refused" in problem and "abc" not in problem
        assert "word" not in problem.replace("password", "")
    assert problem_of("sftp://host:22/folder/a@b") != "refused"
    for text in (
        "404, message='Gone', url='https://host/o?alt=media&sig=SECRET'",
        "cannot open sftp://me:SECRET@host/folder",
        "refused: Authorization: Bearer SECRET.SECRET",
        'bad request {"client_secret": "SECRET", "a": 1}',
        "AccountName=a;AccountKey=SECRET==;End",
    ):
        said = shown(OSError(text))
        assert "SECRET" not in said and "..." in said, said
    assert shown(OSError("abfs://container@account/x is gone: key: none")).endswith("key: none")


def test_a_write_that_fails_leaves_no_part_of_an_object(tmp_path, monkeypatch):
    def half(self, path, value, **more):
        Path(path).write_bytes(value[:2])
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", half)
    with pytest.raises(RemoteError, match="Input/output error"):
        store(f"file://{tmp_path}/run").write("a", b"12345678")
    assert not any((tmp_path / "run").iterdir())


def test_a_full_local_disk_is_named_and_not_tried_again(tmp_path):
    store("faulty://bucket/run").write("a", b"12345678")
    tried = []

    def full(call):
        tried.append(call.path)
        raise OSError(errno.ENOSPC, "No space left on device")

    faulty_files.use(full, names=("get_file",))
    with pytest.raises(ResourceError, match=f"{tmp_path}/a cannot be written: No space left.*free"):
        store("faulty://bucket/run").get("a", tmp_path / "a")
    assert len(tried) == 1


def test_a_copy_of_a_folder_does_not_have_its_lock(tmp_path):
    first = Lock(store(), tmp_path / "first", TIMES)
    first.acquire()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with pytest.raises(LockHeld, match=f"is in use by the run in {tmp_path}/first"):
        Lock(store(), tmp_path / "second", TIMES).acquire()
    first.check()
    first.release()


def test_of_two_runs_one_gets_the_lock_and_the_other_is_refused_by_name(url, tmp_path):
    first = Lock(store(url), tmp_path / "first", TIMES)
    first.acquire()
    with pytest.raises(LockHeld, match=f"is in use by the run in {tmp_path}/first on .*renewed"):
        Lock(store(url), tmp_path / "second", TIMES).acquire()
    first.check()
    first.release()
    assert store(url).facts(LOCK) is None
    second = Lock(store(url), tmp_path / "second", TIMES)
    second.acquire()
    second.release()


def _left_behind(folder, lease_s=0.6):
    """Returns a lock whose process is gone: nobody renews it."""
    lock = Lock(store(), folder, LeaseTimes(lease_s=lease_s, renew_s=99, look_s=0.02, settle_s=0))
    lock.acquire()
    return lock


def test_a_lock_that_nobody_renews_is_taken_when_it_has_expired(tmp_path):
    left = _left_behind(tmp_path / "first")
    second = Lock(store(), tmp_path / "second", TIMES)
    second.acquire()
    assert json.loads(store().read(LOCK))["folder"] == str(tmp_path / "second")
    with pytest.raises(LockHeld, match="second"):
        left.renew()
        left.check()
    left.release()
    assert json.loads(store().read(LOCK))["folder"] == str(tmp_path / "second")
    second.release()


def test_the_next_start_in_the_same_folder_has_the_lock_at_once(tmp_path):
    _left_behind(tmp_path / "first", lease_s=600)
    began = time.monotonic()
    again = Lock(store(), tmp_path / "first", TIMES)
    again.acquire()
    again.release()
    assert time.monotonic() - began < 300


def test_the_lock_of_a_process_that_is_gone_on_this_machine_is_free(tmp_path):
    """Also in another folder, for instance if the first one was removed."""
    left = _left_behind(tmp_path / "first", lease_s=600)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    values = json.loads(store().read(LOCK)) | {"process": ended.pid}
    store().write(LOCK, json.dumps(values | {"machine": "of another start"}).encode())
    other = Lock(store(), tmp_path / "other", TIMES)
    holder = lock_module.holder_in(store().read(LOCK))
    assert holder is not None and not other._is_free(holder, watched=0)
    store().write(LOCK, json.dumps(values).encode())
    other.acquire()
    other.release()
    left._ended.set()


def test_a_lock_of_a_clock_that_is_far_ahead_is_taken_when_nobody_has_renewed_it(tmp_path):
    left = _left_behind(tmp_path / "first", lease_s=1e6)
    second = Lock(store(), tmp_path / "second", TIMES)
    second.acquire()
    second.release()
    left._ended.set()


def test_a_lock_of_a_clock_that_is_behind_is_not_taken_while_it_is_renewed(tmp_path):
    """By the clock of this machine it has always expired."""
    left = _left_behind(tmp_path / "first", lease_s=-300)
    ended = threading.Event()

    def renew():
        while not ended.wait(0.02):
            left.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(LockHeld, match="first"):
            Lock(store(), tmp_path / "second", TIMES).acquire()
    finally:
        ended.set()
        thread.join()
    second = Lock(store(), tmp_path / "second", TIMES)
    second.acquire()
    second.release()
    left._ended.set()


def test_a_lock_goes_on_over_faults_and_after_it_was_removed(tmp_path):
    lock = Lock(store(), tmp_path / "first", TIMES)
    lock.acquire()
    faulty_files.use(faulty_files.fail(SERVICE_BUSY, 1, 2, 3))
    lock.renew()
    store().delete(LOCK)
    lock.renew()
    lock.check()
    assert store().facts(LOCK) is not None
    lock.release()


def test_of_many_that_start_at_once_one_gets_the_lock(tmp_path):
    winners = []

    def start(number):
        lock = Lock(store(), tmp_path / str(number), LeaseTimes(2.0, 0.05, 0.02, 0.2))
        try:
            lock.acquire()
        except LockHeld:
            return
        winners.append(number)
        time.sleep(1.0)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(winners) == 1
