"""Checkpoints: damage is detected and named, the previous one is taken; a kill or a full disk loses
nothing."""

import logging
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import full_disk
import jax.numpy as jnp
import numpy as np
import pytest

from rl.run.checkpoint import CheckpointError, Checkpoints
from rl.run.manifest import examine
from rl.run.resume.best import named_by

PROCESS = Path(__file__).with_name("checkpoint_process.py")


def arrays(number):
    return {
        "w": jnp.asarray(np.random.default_rng(number).normal(size=(64, 32)), jnp.float32),
        "n": jnp.int32(number),
    }


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints 1, 2 and 3, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(directory, keep=3)
    for number in (1, 2, 3):
        checkpoints.save(number, arrays(number), {"number": number})
    checkpoints.close()
    return directory


@pytest.fixture
def copy(three, tmp_path):
    return Path(shutil.copytree(three, tmp_path / "checkpoints"))


def files(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def check_falls_back(directory, caplog, named):
    """Both ways of reading take checkpoint 2, and the warning names the file in checkpoint 3."""
    with caplog.at_level(logging.WARNING, "duet.checkpoint"):
        caplog.clear()
        number, restored, host = Checkpoints(directory, keep=3).restore(arrays(0))
        assert Checkpoints(directory, keep=3).host() == (2, {"number": 2})
    assert (number, host) == (2, {"number": 2})
    assert all(np.array_equal(restored[name], x) for name, x in arrays(2).items())
    messages = [r.getMessage() for r in caplog.records if r.name == "duet.checkpoint"]
    assert len(messages) == 2 and all("0000000003" in m and named in m for m in messages), messages


def flip(path):
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1 << 3
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
def test_damage_to_any_file_is_named_and_the_previous_checkpoint_taken(copy, caplog, damage):
    newest = copy / "0000000003"
    names = files(newest)
    assert {"manifest.json", "host.json", "arrays/_METADATA", "arrays/manifest.ocdbt"} <= set(names)
    for name in names:
        intact = (newest / name).read_bytes()
        damage(newest / name)
        check_falls_back(copy, caplog, named=name)
        (newest / name).write_bytes(intact)
    assert Checkpoints(copy, keep=3).host() == (3, {"number": 3})


def test_any_byte_of_the_manifest_counts(copy):
    manifest = copy / "0000000003" / "manifest.json"
    intact = manifest.read_bytes()
    for place in range(0, len(intact), 7):
        changed = bytearray(intact)
        changed[place] ^= 1 << (place % 8)
        manifest.write_bytes(changed)
        assert Checkpoints(copy, keep=3).host() == (2, {"number": 2}), (
            place,
            bytes(changed[place : place + 1]),
        )
    manifest.write_bytes(intact)
    assert Checkpoints(copy, keep=3).host() == (3, {"number": 3})


def test_an_extra_file_is_named(copy, caplog):
    (copy / "0000000003" / "arrays" / "d" / "stray").write_text("x")
    check_falls_back(copy, caplog, named="arrays/d/stray")


def test_a_link_to_nowhere_is_named(copy, caplog):
    path = copy / "0000000003" / "host.json"
    path.unlink()
    path.symlink_to("nowhere")
    check_falls_back(copy, caplog, named="host.json")


def test_a_file_of_another_checkpoint_is_noticed(copy, caplog):
    shutil.copy(copy / "0000000002" / "host.json", copy / "0000000003" / "host.json")
    check_falls_back(copy, caplog, named="host.json")


def test_an_unfinished_save_is_left_out_and_removed_by_the_next_save(copy, caplog):
    shutil.copytree(copy / "0000000003", copy / "0000000004.tmp-1")
    (copy / "0000000004.tmp-1" / "manifest.json").unlink()
    checkpoints = Checkpoints(copy, keep=2)
    with caplog.at_level(logging.WARNING, "duet.checkpoint"):
        assert checkpoints.host() == (3, {"number": 3})
    assert "0000000004.tmp-1: unfinished" in caplog.text
    checkpoints.save(4, arrays(4), {"number": 4}, wait=True)
    assert sorted(p.name for p in copy.iterdir()) == ["0000000003", "0000000004"]


def test_with_none_undamaged_the_error_names_each(copy):
    for path in copy.iterdir():
        (path / "host.json").unlink()
    checkpoints = Checkpoints(copy, keep=2)
    for read in (checkpoints.host, lambda: checkpoints.restore(arrays(0))):
        with pytest.raises(
            CheckpointError,
            match="(?s)0000000003: host.json: missing.*0000000001: host.json: missing",
        ):
            read()


def test_after_a_fall_back_the_damaged_one_is_saved_again(copy):
    flip(copy / "0000000003" / "host.json")
    checkpoints = Checkpoints(copy, keep=2)
    assert checkpoints.restore(arrays(0))[0] == 2
    checkpoints.save(3, arrays(30), {"number": 30}, wait=True)
    number, restored, host = checkpoints.restore(arrays(0))
    assert (number, int(restored["n"]), host) == (3, 30, {"number": 30})
    assert sorted(p.name for p in copy.iterdir()) == ["0000000002", "0000000003"]


@pytest.mark.parametrize("host", [b"\xff", b"{", b"7"])
def test_an_old_host_that_cannot_be_read_is_rotated_away(copy, host):
    file = copy / "0000000002" / "host.json"
    file.write_bytes(host.ljust(file.stat().st_size))
    checkpoints = Checkpoints(copy, keep=3, needed=named_by)
    checkpoints.save(4, arrays(4), {}, wait=True)
    assert sorted(p.name for p in copy.iterdir()) == ["0000000001", "0000000003", "0000000004"]
    checkpoints.close()


class _Killed(BaseException):
    """Stands for a kill: nothing in the thread may catch it, so that the disk stays as it was at
    that moment."""


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("rl.run.checkpoint.seal", 3),  # the arrays are there, no manifest
        ("rl.run.checkpoint.Checkpoints._publish", 3),  # complete under its temporary name
        ("rl.run.checkpoint.sync_directory", 4),  # renamed
        ("rl.run.checkpoint.Checkpoints._rotate", 4),
        ("shutil.rmtree", 4),  # an old one is half removed
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_kill_between_any_two_steps_leaves_a_checkpoint(
    copy, monkeypatch, caplog, place, expected, again
):
    """`again`: the number exists already, and is being replaced."""
    number, expected_number = (3, 3) if again else (4, expected)
    checkpoints = Checkpoints(copy, keep=1)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def killed(path=None, *_, **__):
        if place == "shutil.rmtree":
            (path / "host.json").unlink()
        raise _Killed

    with monkeypatch.context() as patched:
        patched.setattr(place, killed)
        checkpoints.save(number, arrays(number), {"number": number}, wait=True)
    following = Checkpoints(copy, keep=1)
    with caplog.at_level(logging.WARNING, "duet.checkpoint"):
        assert following.host() == (expected_number, {"number": expected_number})
    assert "damaged" not in caplog.text
    assert all(not examine(path)[1] for path in copy.iterdir() if path.name.isdigit())
    following.save(5, arrays(5), {"number": 5}, wait=True)
    assert [p.name for p in copy.iterdir()] == ["0000000005"]


def test_a_kill_while_one_is_replaced_leaves_the_replaced_one(copy, monkeypatch):
    checkpoints = Checkpoints(copy, keep=1)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    rename = Path.rename

    def killed_before_the_second(path, target):
        if ".tmp-" in path.name and target == copy / "0000000003":
            raise _Killed
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_before_the_second)
        checkpoints.save(3, arrays(30), {"number": 30}, wait=True)
    assert not (copy / "0000000003").exists()
    following = Checkpoints(copy, keep=1)
    assert following.host() == (3, {"number": 3})
    following.save(3, arrays(31), {"number": 31}, wait=True)
    assert following.host() == (3, {"number": 31})
    assert [p.name for p in copy.iterdir()] == ["0000000003"]


@pytest.mark.slow
def test_sharded_arrays_on_four_devices(tmp_path):
    done = subprocess.run(
        [sys.executable, PROCESS, "sharded", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_limit_on_file_size_keeps_the_last_good_checkpoint(tmp_path):
    """EFBIG from the operating system, met by Orbax's own writers; their tracebacks do not bury the
    message."""
    done = subprocess.run(
        [sys.executable, PROCESS, "limited", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("duet.checkpoint")]
    assert len(lines) == 4, done.stdout
    assert "absl ERROR" not in done.stdout
    assert all(" free of " in line and "that are needed" in line for line in lines)
    assert all(
        "duet.checkpoint ERROR checkpoint 2 was NOT saved" in line and "File too large" in line
        for line in lines
    )


@pytest.mark.slow
@pytest.mark.skipif(not full_disk.available(), reason="no process may mount a file system here")
def test_a_disk_that_is_full_at_any_byte_of_a_save_shows_one_message(tmp_path):
    done = full_disk.run(PROCESS, "full", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) >= 20 and all(
        line.startswith("duet.checkpoint ERROR checkpoint") for line in lines
    ), done.stdout
    assert all("was NOT saved" in line and "No space left on device" in line for line in lines)


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path):
    """Each process continues from what the one killed before it left, and checks it bit by bit."""
    rng, reached = random.Random(10), -1
    for _ in range(10):
        command = [sys.executable, PROCESS, "save", tmp_path]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            first = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
            rest, errors = process.communicate()
        assert first, errors
        assert int(first) >= reached
        # The save before the last one that was begun is complete.
        reached = int((first + rest).split()[-1]) - 1
        result = Checkpoints(tmp_path, keep=2).host()
        assert (result[0] if result else -1) >= reached, errors


def test_reading_does_not_disturb_a_run_that_is_saving(copy):
    """An unfinished directory may belong to a live process: only a save removes it."""
    (copy / "0000000004.tmp-1").mkdir()
    reader = Checkpoints(copy, keep=1)
    assert reader.restore(arrays(0))[0] == 3
    assert reader.host()[0] == 3
    reader.close()
    assert (copy / "0000000004.tmp-1").is_dir()
