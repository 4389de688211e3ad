"""The mirror of a run in a remote folder, on folders without jax: what a new machine fetches after
a kill at every operation, faults of the service, damage, rotation, and two runs on one folder."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import faulty_files
import pytest
import remote_runs
from fsspec.implementations.memory import MemoryFileSystem

from rl.commands import cli
from rl.errors import ConfigError
from rl.remote import store as store_module
from rl.remote.faults import RemoteError, Retries
from rl.remote.lock import LOCK, LeaseTimes, Lock, LockHeld
from rl.remote.store import Store
from rl.run.manifest import MANIFEST, complete, examine
from rl.run.mirror.mirror import RunMirror

QUICK = Retries(tries=4, sleep=lambda seconds: None)
TIMES = LeaseTimes(lease_s=0.6, renew_s=0.1, look_s=0.02, settle_s=0.0)
SHORT = LeaseTimes(lease_s=0.1, renew_s=0.02, look_s=0.01, settle_s=0.0)
"""Where a killed process leaves its lock again and again."""
SERVICE_BUSY = OSError(errno.EIO, "the service is busy")


@pytest.fixture(autouse=True)
def _clean(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no test here ends the machine
    faulty_files.clear()
    yield
    faulty_files.clear()
    MemoryFileSystem.store.clear()


@pytest.fixture
def run(tmp_path):
    remote_runs.start(tmp_path / "run")
    return tmp_path / "run"


def mirror(run: Path, url="faulty://bucket/run", keep=2):
    run.mkdir(parents=True, exist_ok=True)
    times = SHORT if url.startswith("faulty-disk") else TIMES
    return RunMirror(url, run, keep, remote_runs.needed, QUICK, times)


def objects(url="faulty://bucket/run"):
    return set(Store(url).list())


def checkpoints(url="faulty://bucket/run"):
    """Returns the numbers of the checkpoints that have a manifest in the remote folder."""
    return sorted(int(name.split("/")[1]) for name in objects(url) if name.endswith(MANIFEST))


def steps(run: Path):
    return [json.loads(line)["step"] for line in (run / "events.jsonl").read_text().splitlines()]


def train(run: Path, url="faulty://bucket/run", numbers=(1, 2, 3), keep=2):
    """Makes steps with a checkpoint after each, and waits for the uploads."""
    with mirror(run, url, keep):
        for number in numbers:
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number, keep=keep)


@pytest.mark.parametrize("scheme", ["memory", "file", "faulty", "faulty-disk"])
def test_an_empty_folder_gets_the_run_with_the_same_bytes(scheme, run, tmp_path):
    on_disk = scheme in ("file", "faulty-disk")
    url = f"{scheme}://{tmp_path}/remote" if on_disk else f"{scheme}://bucket/run"
    with mirror(run, url) as open_mirror:
        for number in (1, 2, 3):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number)
            open_mirror.checkpoint_written()
        remote_runs.make_model(run, "base")
        remote_runs.make_model(run, "export")
    assert LOCK not in objects(url)
    with mirror(tmp_path / "new", url):
        pass
    there = remote_runs.contents(run)
    newest = {name: data for name, data in there.items() if "checkpoints/0000000002" not in name}
    assert remote_runs.contents(tmp_path / "new") == newest
    assert not examine(tmp_path / "new" / "checkpoints" / "0000000003")[1]


def test_old_checkpoints_follow_those_of_the_run_and_needed_ones_stay(run):
    with mirror(run) as open_mirror:
        for number in range(1, 7):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number, needs=2 if number > 2 else None)
            open_mirror.checkpoint_written()
            _wait_for(lambda number=number: number in checkpoints())
    assert checkpoints() == [2, 5, 6]
    assert {name.split("/")[1] for name in objects() if name.startswith("checkpoints")} == {
        f"{number:010d}" for number in (2, 5, 6)
    }


def test_a_needed_checkpoint_is_sent_before_the_one_that_needs_it(run):
    with mirror(run):
        remote_runs.checkpoint(run, 1)
        remote_runs.checkpoint(run, 2)
        remote_runs.checkpoint(run, 3, needs=1)
        log = faulty_files.use().log
    manifests = [path for name, path in log if name == "put_file" and path.endswith(MANIFEST)]
    assert [path.split("/")[-2] for path in manifests] == ["0000000001", "0000000003"]


def test_a_manifest_comes_after_everything_that_a_run_needs_to_go_on(run):
    remote_runs.make_model(run, "base")
    with mirror(run):
        remote_runs.step(run, 1)
        remote_runs.checkpoint(run, 1)
        log = faulty_files.use().log
    sent = [path.removeprefix("/bucket/run/") for name, path in log if name != "rm_file"]
    place = sent.index("checkpoints/0000000001/manifest.json")
    needed = {"base/config.json", "base.files.json", "events.jsonl", "samples.jsonl", "tokens.bin"}
    assert needed | {"checkpoints/0000000001/host.json"} <= set(sent[:place])
    assert sent.index("samples.jsonl") < sent.index("tokens.bin")
    first = sent.index("events.jsonl")  # a kill after one record leaves what is known as a run
    assert max(sent.index("run.json"), sent.index("config.yml")) < first


def _killed(act, scheme_url: str, run: Path, numbers):
    """Trains in a process that the plan kills. Returns whether it was killed."""

    def child():
        faulty_files.use(act)
        train(run, scheme_url, numbers)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("death", [faulty_files.die, faulty_files.die_within])
def test_a_run_killed_at_any_operation_goes_on_elsewhere_as_if_it_had_not_been(death, tmp_path):
    """The remote folder has checkpoint 1; the process dies while it sends checkpoint 2. A machine
    with an empty folder then gets one of the two, with all lines up to it."""
    url = f"faulty-disk://{tmp_path}/remote"
    results = set()
    for operation in range(1, 200):
        for folder in ("remote", "run", "new"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        faulty_files.use()
        remote_runs.start(tmp_path / "run")
        train(tmp_path / "run", url, [1], keep=1)
        killed = _killed(death(operation), url, tmp_path / "run", [2])
        new = tmp_path / "new"
        with mirror(new, url, keep=1):
            (number, path), *others = complete(new / "checkpoints")
            assert not others and not examine(path)[1]
            assert steps(new)[:number] == list(range(1, number + 1))
            assert (new / "tokens.bin").stat().st_size >= 17 * number
            results.add(number)
        if not killed:
            break
        train(new, url, [2], keep=1)
        assert checkpoints(url) == [2]
        left = [name for name in objects(url) if "checkpoints" in name]
        assert len(left) == 4, left
    else:
        raise AssertionError("the process was never done")
    assert results == {1, 2} and operation > 10


def test_a_fetch_killed_at_any_operation_is_made_again(run, tmp_path):
    url = f"faulty-disk://{tmp_path}/remote"
    remote_runs.make_model(run, "base")
    train(run, url, [1, 2])
    new = tmp_path / "new"

    def child(number):
        faulty_files.use(faulty_files.die_within(number), names=("get_file",))
        with mirror(new, url):
            pass

    for number in range(1, 100):
        process = multiprocessing.get_context("fork").Process(target=child, args=(number,))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert complete(new / "checkpoints") == []
    assert number > 8 and not examine(new / "checkpoints" / "0000000002")[1]
    there = {k: v for k, v in remote_runs.contents(run).items() if "0000000001/" not in k}
    here = {k: v for k, v in remote_runs.contents(new).items() if ".tmp" not in k}
    assert here == there


def test_faults_that_pass_are_not_seen_and_others_leave_the_run_as_it_is(run, tmp_path, caplog):
    faulty_files.use(faulty_files.fail(SERVICE_BUSY, 2, 3, 5, 9, 14, 15))
    train(run, numbers=[1])
    assert checkpoints() == [1] and "NOT uploaded" not in caplog.text
    faulty_files.use(faulty_files.truncate(2, 6, 8))
    train(run, numbers=[2])
    faulty_files.use()
    with mirror(tmp_path / "new"):
        pass
    assert not examine(tmp_path / "new" / "checkpoints" / "0000000002")[1]

    def no_more_checkpoints(call):
        if "checkpoints" in call.path:
            raise PermissionError(errno.EACCES, "Forbidden")

    before = remote_runs.contents(run)
    with (
        pytest.raises(RemoteError, match=r"lacks the last changes .*Forbidden.*rl-train"),
        mirror(run),
    ):
        faulty_files.use(no_more_checkpoints)
        remote_runs.checkpoint(run, 3)
    assert RemoteError.exit_code == 5 and "NOT uploaded" in caplog.text
    assert before.keys() - remote_runs.contents(run).keys() == {
        name for name in before if name.startswith("checkpoints/0000000001")
    }
    faulty_files.use()
    assert checkpoints() == [1, 2]
    with mirror(run):
        pass
    assert checkpoints() == [2, 3]


def test_an_upload_that_failed_is_made_up_for_after_the_next_checkpoint(run, caplog):
    broken = True

    def act(call):
        if broken and call.path.endswith("host.json"):
            raise PermissionError(errno.EACCES, "Forbidden")

    with mirror(run) as open_mirror:
        faulty_files.use(act)
        remote_runs.checkpoint(run, 1)
        open_mirror.checkpoint_written()
        _wait_for(lambda: "NOT uploaded" in caplog.text)
        broken = False
        remote_runs.checkpoint(run, 2)
        open_mirror.checkpoint_written()
        _wait_for(lambda: 2 in checkpoints())
    assert checkpoints() == [2]


def test_an_error_of_the_run_comes_before_that_of_the_upload(run, caplog):
    with pytest.raises(ZeroDivisionError), mirror(run):
        faulty_files.use(faulty_files.fail(PermissionError(errno.EACCES, "Forbidden")))
        remote_runs.checkpoint(run, 1)
        raise ZeroDivisionError
    assert "lacks the last changes of the run" in caplog.text


def test_training_does_not_wait_and_a_slow_upload_is_shown_and_leaves_checkpoints_out(run, caplog):
    with mirror(run) as open_mirror:
        faulty_files.use(faulty_files.wait(0.05))
        for number in range(1, 9):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number, keep=1)
            open_mirror.checkpoint_written()
            if number == 1:
                _wait_for(lambda: faulty_files.plan.log)
    assert caplog.text.count("raise run.checkpoint_every") == 1
    manifests = [path for name, path in faulty_files.plan.log if path.endswith(MANIFEST)]
    sent = [path.split("/")[-2] for path in manifests if path in manifests]
    assert "0000000001" in sent and "0000000008" in sent and len(set(sent)) < 8
    assert checkpoints()[-1] == 8


def test_broken_checkpoints_are_passed_over_and_named(run, tmp_path, caplog):
    train(run, numbers=[1, 2])
    remote_runs.checkpoint(run, 3)
    with mirror(run):
        pass
    store = Store("faulty://bucket/run")
    broken = next(name for name in objects() if "0000000003/arrays/d" in name)
    store.write(broken, b"x" * len(store.read(broken)))
    store.write("checkpoints/0000000004/host.json", b"{}")
    with mirror(tmp_path / "new"):
        assert [number for number, _ in complete(tmp_path / "new" / "checkpoints")] == [2]
        remote_runs.checkpoint(tmp_path / "new", 3, content="again")
    assert "0000000003: arrays/d" in caplog.text and "bytes changed (SHA-256)" in caplog.text
    assert "0000000004: its upload was cut off" in caplog.text
    assert checkpoints() == [2, 3]
    assert not any("0000000004" in name for name in objects())
    shutil.rmtree(tmp_path / "new")
    with mirror(tmp_path / "new"):
        path = tmp_path / "new" / "checkpoints" / "0000000003"
        assert "again" in next((path / "arrays" / "d").iterdir()).read_text()


@pytest.mark.parametrize("damage", ["missing", "manifest"])
def test_a_run_with_damaged_checkpoints_only_is_not_begun_again(run, tmp_path, damage):
    train(run, numbers=[1])
    store = Store("faulty://bucket/run")
    if damage == "missing":
        store.delete("checkpoints/0000000001/host.json")
    else:
        store.write("checkpoints/0000000001/manifest.json", b'{"files": {"../../x": {}}}')
    before = objects()
    with (
        pytest.raises(RemoteError, match="no checkpoint is undamaged:\n.*0000000001") as raised,
        mirror(tmp_path / "new"),
    ):
        pass
    assert objects() == before and "run.remote" in str(raised.value)
    assert complete(tmp_path / "new" / "checkpoints") == []
    assert not (tmp_path / "new" / "events.jsonl").exists()


def test_records_and_weights_come_with_the_checkpoint_before_one_with_a_broken_manifest(
    run, tmp_path
):
    remote_runs.make_model(run, "export")
    train(run, numbers=[1])
    train(run, numbers=[2])
    Store("faulty://bucket/run").write("checkpoints/0000000002/manifest.json", b'{"files": []}')
    with mirror(tmp_path / "new"):
        assert [number for number, _ in complete(tmp_path / "new" / "checkpoints")] == [1]
        assert steps(tmp_path / "new") == steps(run)
        assert (tmp_path / "new" / "export" / "model.safetensors").is_file()


def test_weights_that_are_sent_after_the_checkpoint_was_fetched_are_fetched_too(
    run, tmp_path, capsys
):
    url = f"file://{tmp_path}/remote"
    copy = tmp_path / "copy"
    train(run, numbers=[1], url=url)
    assert cli.main(["fetch", url, str(copy), "--weights"]) == 0
    remote_runs.make_model(run, "export")
    with mirror(run, url):
        pass
    files = Path(f"{tmp_path}/remote/export.files.json")
    sent = files.read_text()
    files.write_text(sent[:-5])
    assert cli.main(["fetch", url, str(copy), "--weights"]) == 5
    assert "export.files.json: truncated or altered" in capsys.readouterr().err
    files.write_text(sent)
    assert cli.main(["fetch", url, str(copy), "--weights"]) == 0
    assert (copy / "export" / "model.safetensors").is_file()


def test_the_newer_of_two_folders_wins(run, tmp_path):
    other = tmp_path / "other"
    train(run, numbers=[1, 2])
    with mirror(other):
        pass
    train(other, numbers=[3, 4])
    assert steps(run) == [1, 2]
    with mirror(run):
        assert complete(run / "checkpoints")[0][0] == 4 and steps(run) == [1, 2, 3, 4]
    remote_runs.step(other, 5)
    remote_runs.checkpoint(other, 5)
    with mirror(other):
        assert complete(other / "checkpoints")[0][0] == 5
    assert checkpoints() == [4, 5]


def test_a_folder_of_another_run_or_of_other_files_is_refused(run, tmp_path):
    train(run, numbers=[1])
    other = tmp_path / "other"
    remote_runs.start(other, name="second")
    before = objects()
    with pytest.raises(ConfigError, match="holds another run than"), mirror(other):
        pass
    assert objects() == before
    Store("faulty://bucket").write("data/rows.jsonl", b"{}")
    said = "holds files but no run .*rows.jsonl"
    with pytest.raises(ConfigError, match=said), mirror(tmp_path / "new", "faulty://bucket/data"):
        pass


def test_files_of_people_stay_in_the_remote_folder(run):
    train(run, numbers=[1])
    Store("faulty://bucket/run").write("NOTES.txt", b"mine")
    train(run, numbers=[2, 3, 4])
    assert "NOTES.txt" in objects()


def test_full_samples_are_sent_once_and_removed_when_the_run_removes_them(run):
    (run / "samples").mkdir()
    for number in range(3):
        for ending in ("jsonl", "bin"):
            (run / "samples" / f"00000{number}-grpo-00001.{ending}").write_text(f"{number}" * 9)
    train(run, numbers=[1])
    faulty_files.use()
    (run / "samples" / "000000-grpo-00001.bin").unlink()
    (run / "samples" / "000000-grpo-00001.jsonl").unlink()
    train(run, numbers=[2])
    assert not [
        path for name, path in faulty_files.plan.log if "/samples/" in path and "rm" not in name
    ]
    assert sorted(name for name in objects() if name.startswith("samples/")) == [
        f"samples/00000{number}-grpo-00001.{ending}"
        for number in (1, 2)
        for ending in ("bin", "jsonl")
    ]


def test_an_export_that_is_moved_aside_is_no_export_of_the_remote_run(run, tmp_path):
    remote_runs.make_model(run, "export")
    train(run, numbers=[1])
    (run / "export").rename(run / "export-grpo-1")
    train(run, numbers=[2])
    with mirror(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / "export-grpo-1" / "model.safetensors").is_file()
    assert not (tmp_path / "new" / "export").exists()


def test_a_second_run_on_the_same_remote_is_refused_while_the_first_goes_on(run, tmp_path):
    with mirror(run):
        remote_runs.checkpoint(run, 1)
        with (
            pytest.raises(LockHeld, match=rf"is in use by the run in {run} on .*run.remote"),
            mirror(tmp_path / "new"),
        ):
            pass
        assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / ".remote-owner"]
    assert checkpoints() == [1]


def test_a_run_that_lost_its_lock_sends_nothing_more(run, tmp_path):
    with (
        pytest.raises(RemoteError, match="in use by the run in .*thief"),
        mirror(run) as open_mirror,
    ):
        remote_runs.checkpoint(run, 1)
        open_mirror.checkpoint_written()
        _wait_for(lambda: 1 in checkpoints())
        thief = Lock(Store("faulty://bucket/run"), tmp_path / "thief", TIMES)
        thief._version = "any"
        store = Store("faulty://bucket/run")
        store.write(LOCK, json.dumps(vars(thief._own())).encode())
        _wait_for(lambda: open_mirror._lock._taken_by is not None)
        remote_runs.checkpoint(run, 2)
    assert checkpoints() == [1] and "thief" in store.read(LOCK).decode()


def test_a_run_that_loses_its_lock_in_an_upload_sends_no_further_file(run, monkeypatch):
    """The other run may be sending a checkpoint of the same number."""
    monkeypatch.setattr(store_module, "_THREADS", 1)
    with pytest.raises(RemoteError, match="in use"), mirror(run) as open_mirror:
        remote_runs.checkpoint(run, 1)
        sent = []

        def lose(call):
            if "checkpoints" in call.path:
                sent.append(call.path)
                open_mirror._lock._taken_by = open_mirror._lock._own()

        faulty_files.use(lose)
    assert len(sent) == 1 and checkpoints() == []


def test_ctrl_c_at_the_end_releases_the_lock_and_does_not_wait_for_an_upload(tmp_path):
    """In a process of its own, whose end would wait for the threads of a pool."""
    script = f"""
import os, signal, sys, threading, time
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
import faulty_files, remote_runs
from pathlib import Path
from rl.run.mirror.mirror import RunMirror
from rl.remote.lock import LeaseTimes
run = Path({str(tmp_path / "run")!r})
remote_runs.start(run)
remote_runs.checkpoint(run, 1)
stuck = threading.Event()

def hang(call):
    if "checkpoints" in call.path:
        stuck.set()
        time.sleep(600)

faulty_files.use(hang)

def interrupt():
    stuck.wait()
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
with RunMirror("faulty-disk://{tmp_path}/remote", run, 1, times=LeaseTimes(settle_s=0.0)):
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr, done
    assert not (tmp_path / "remote" / LOCK).exists()


def test_a_full_local_disk_is_told_without_a_traceback_and_the_next_upload_works(run, caplog):
    from rl.run.mirror import local_files

    real = local_files._copied

    def full(file, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with mirror(run) as open_mirror:
        local_files._copied = full
        try:
            remote_runs.checkpoint(run, 1)
            open_mirror.checkpoint_written()
            _wait_for(lambda: "No space left" in caplog.text)
        finally:
            local_files._copied = real
        remote_runs.checkpoint(run, 2)
    assert "GiB free" in caplog.text and "Traceback" not in caplog.text
    assert checkpoints() == [2]


def test_a_store_that_lists_late_loses_no_checkpoint(run, tmp_path, monkeypatch):
    """Each listing is the one before: it lacks new objects and has removed ones."""
    listings = [{}]
    listed = Store.list

    def late(self, folder=""):
        listings.append(listed(self, folder))
        return listings[-2]

    monkeypatch.setattr(Store, "list", late)
    with mirror(run) as open_mirror:
        for number in range(1, 6):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number)
            open_mirror.checkpoint_written()
            _wait_for(lambda: not open_mirror.uploads.is_busy)
    monkeypatch.setattr(Store, "list", listed)
    assert checkpoints()[-2:] == [4, 5]
    with mirror(tmp_path / "new"):
        pass
    assert [number for number, _ in complete(tmp_path / "new/checkpoints")] == [5]
    assert steps(tmp_path / "new") == [1, 2, 3, 4, 5]


def test_a_replaced_checkpoint_stays_until_its_successor_is_there(run, tmp_path):
    """A run that is extended saves the same number again. A kill meanwhile leaves one of both."""
    url = f"faulty-disk://{tmp_path}/remote"
    for operation in range(1, 100):
        shutil.rmtree(tmp_path / "remote", ignore_errors=True)
        shutil.rmtree(run)
        faulty_files.use()
        remote_runs.start(run)
        train(run, url, [1], keep=1)
        remote_runs.checkpoint(run, 1, content="replaced")

        def child(operation=operation):
            faulty_files.use(faulty_files.die(operation))
            with mirror(run, url, keep=1):
                pass

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        new = tmp_path / f"new-{operation}"
        with mirror(new, url, keep=1):
            ((number, path),) = complete(new / "checkpoints")
            assert number == 1 and not examine(path)[1]
        if process.exitcode == 0:
            break
    assert operation > 8
    assert "replaced" in next((path / "arrays" / "d").iterdir()).read_text()
    assert not any(".replaced" in name for name in objects(url))


def test_samples_are_copied_between_two_rotations(run):
    """Lines never come without their tokens, and no line comes twice."""
    from rl.run.mirror.local_files import records

    remote_runs.step(run, 1)
    (run / "samples").mkdir()
    os.replace(run / "tokens.bin", run / "samples" / "000000-grpo-00001.bin")
    with pytest.raises(OSError, match="again and again"):
        records(run)
    os.replace(run / "samples.jsonl", run / "samples" / "000000-grpo-00001.jsonl")
    names = [each.name for each in records(run)]
    assert "samples/000000-grpo-00001.bin" in names and "samples.jsonl" not in names


def _wait_for(is_so, seconds=20.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_records_of_a_remote_run_are_copied_while_it_goes_on(run, tmp_path, capsys):
    url = f"file://{tmp_path}/remote"
    copy = tmp_path / "copy"
    remote_runs.make_model(run, "export")
    with mirror(run, url) as open_mirror:
        for number in (1, 2):
            remote_runs.step(run, number)
            remote_runs.checkpoint(run, number)
            open_mirror.checkpoint_written()
            _wait_for(lambda number=number: number in checkpoints(url))
            assert cli.main(["fetch", url, str(copy)]) == 0
            assert steps(copy) == list(range(1, number + 1))
    assert not (copy / "checkpoints").exists() and not (copy / "export").exists()
    assert cli.main(["fetch", url, str(copy), "--weights"]) == 0
    assert (copy / "export" / "model.safetensors").is_file()
    assert [number for number, _ in complete(copy / "checkpoints")] == [2]
    assert cli.main(["fetch", url, str(copy)]) == 2
    assert "has checkpoints" in capsys.readouterr().err
    assert cli.main(["fetch", f"{url}-absent", str(tmp_path / "other")]) == 2
    assert cli.main(["stop", "gs://bucket/runs/first"]) == 2
    assert "rl fetch gs://bucket/runs/first runs/first" in capsys.readouterr().err


def test_a_run_that_did_not_see_the_checkpoints_there_replaces_nothing(run, tmp_path, monkeypatch):
    train(run, numbers=[1, 2])
    before = {name: Store("faulty://bucket/run").read(name) for name in objects()}
    monkeypatch.setattr("rl.run.mirror.mirror.fetch", lambda remote, folder: None)
    remote_runs.start(tmp_path / "new")
    with pytest.raises(RemoteError, match="has checkpoint 2, which this run has neither sent nor"):
        train(tmp_path / "new", numbers=[1])
    assert {name: Store("faulty://bucket/run").read(name) for name in objects()} == before
