"""A run with a remote folder: killed, it goes on in an empty folder to the bits of a run that nothing
disturbed."""

import json
import os
import shutil
import signal

import launch
import pytest
import test_processes as processes

from rl.records.run_files import attempts
from rl.remote.store import Store
from rl.run.manifest import complete, examine
from rl.run.mirror.requests import is_shard


@pytest.mark.slow
def test_a_run_killed_on_one_machine_goes_on_to_the_same_bits_on_another(uninterrupted, tmp_path):
    url = f"file://{tmp_path}/remote"
    remote = f"run.remote={url}"
    first = tmp_path / "first"
    manifest = tmp_path / "remote/checkpoints/0000000006/manifest.json"  # two steps of grpo
    assert launch.killed(launch.arguments(first, remote), manifest.exists)
    assert not (tmp_path / "remote/export").exists()
    lock = tmp_path / "remote/LOCK"
    assert lock.exists()
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"expires": 0}))  # as if waited for
    shutil.rmtree(first)

    second = tmp_path / "second"
    code, _, err = launch.finish(launch.process(*launch.arguments(second, remote)))
    assert code == 0, err
    assert "is fetched to" in err
    launch.assert_same_run(second, uninterrupted)
    assert len(attempts(second, [])) == 2
    assert not lock.exists()

    third = tmp_path / "third"  # finished: the weights are fetched, and nothing is computed
    code, out, err = launch.finish(launch.process(*launch.arguments(third, remote)))
    assert code == 0 and "is finished" in out, err
    launch.assert_same_run(third, uninterrupted)


@pytest.mark.slow
def test_processes_that_are_interrupted_wait_for_the_upload_and_go_on_elsewhere(tmp_path):
    """SIGTERM after the first step: the last checkpoint is in the remote folder when all have
    ended."""
    url = f"file://{tmp_path}/remote"
    more = (f"run.remote={url}", "run.checkpoint_every=0")
    running = processes.start(tmp_path / "first", 2, 1, *more)
    launch.wait_for(lambda: launch.lines(tmp_path / "first") >= 1, running[0])
    running[1].send_signal(signal.SIGTERM)
    done = processes.finish(running)
    assert [code for code, _, _ in done] == [75, 75], done
    assert "LOCK" not in Store(url).list()
    (number, _) = complete(tmp_path / "first" / "checkpoints")[0]
    assert f"checkpoints/{number:010d}/manifest.json" in Store(url).list()
    done = processes.finish(processes.start(tmp_path / "second", 2, 1, *more))
    assert [code for code, _, _ in done] == [0, 0], done
    assert "is fetched to" in done[0][2]
    assert "export/model.safetensors" in Store(url).list()


SPLIT = ("mesh.fsdp=2", "generator.rules=stationary")


def apart(place, *more, count: int = 2, devices: int = 1) -> list:
    """Starts `rl-train` in processes with folders of their own."""
    environment = processes.on_devices(devices) | {"COUNTED": str(place / "counted")}
    join = ["--processes", str(count), "--coordinator", processes.address()]
    return [
        launch.process(
            *launch.arguments(place / f"machine-{i}", *processes.RUN, *SPLIT, *more),
            *join,
            "--process",
            str(i),
            environment=environment,
        )
        for i in range(count)
    ]


@pytest.mark.slow
def test_processes_without_a_common_folder_go_on_to_the_same_bits(tmp_path):
    """All are killed after a checkpoint, their folders are gone, and two other machines go on; then
    one process with both devices reads the checkpoints of the two."""
    remote = f"run.remote=file://{tmp_path}/remote"
    steps = f"stages={json.dumps([processes.GRPO | {'steps': 4}])}"
    done = processes.finish(processes.start(tmp_path / "run", 2, 1, "mesh.fsdp=2", steps))
    assert [code for code, _, _ in done] == [0, 0], done

    first = tmp_path / "first"
    first.mkdir()
    running = apart(first, remote, steps)
    folders = tmp_path / "remote/checkpoints"
    launch.wait_for(lambda: list(folders.glob("*/manifest.json")), running[0])
    for each in running:
        os.killpg(each.pid, signal.SIGKILL)
    processes.finish(running)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "remote", kept)
    shutil.rmtree(first)
    expire(tmp_path / "remote/LOCK")

    second = tmp_path / "second"
    second.mkdir()
    done = processes.finish(apart(second, remote, steps))
    assert [code for code, _, _ in done] == [0, 0], done
    assert "is fetched to" in done[0][2], done
    launch.assert_same_run(second / "machine-0", tmp_path / "run")
    assert "export/model.safetensors" in Store(remote.partition("=")[2]).list()
    parts = (second / "machine-0", second / "machine-1/process-1")
    numbers = [complete(each / "checkpoints")[0] for each in parts]
    assert numbers[0][0] == numbers[1][0] == complete(folders)[0][0]
    shards = [
        {
            file.relative_to(path)
            for file in path.rglob("*")
            if file.is_file() and is_shard(file.name)
        }
        for _, path in numbers
    ]
    assert shards[0] and shards[1] and not shards[0] & shards[1]
    assert examine(complete(folders)[0][1])[1] == []

    expire(kept / "LOCK")
    [(code, out, err)] = processes.finish(
        processes.start(tmp_path / "alone", 1, 2, *SPLIT, steps, f"run.remote=file://{kept}")
    )
    assert code == 0 and "continuing" in out, (out, err)
    processes.assert_same_numbers(tmp_path / "alone", tmp_path / "run")


@pytest.mark.slow
def test_parts_that_were_not_sent_are_sent_at_the_next_start(tmp_path):
    """SIGTERM to one process; then the remote folder lacks the newest manifest, as if the upload had
    been cut off. The stage goes on from its best step, which is read back from there."""
    options = {"max_operand": 9, "operations": ["+"], "problems": 16}
    stage = processes.SFT | {
        "steps": 12,
        "held_out": {"data": {"task": "arithmetic", "options": options}, "every": 1},
        "best": {"metric": "held_out/loss", "mode": "max"},
    }
    stages = f"stages={json.dumps([stage])}"
    done = processes.finish(processes.start(tmp_path / "run", 2, 1, "mesh.fsdp=2", stages))
    assert [code for code, _, _ in done] == [0, 0], done

    remote = f"run.remote=file://{tmp_path}/remote"
    running = apart(tmp_path, remote, stages)
    launch.wait_for(lambda: launch.lines(tmp_path / "machine-0") >= 2, running[0])
    running[1].send_signal(signal.SIGTERM)
    done = processes.finish(running)
    assert [code for code, _, _ in done] == [75, 75], done
    here = tmp_path / "machine-0/checkpoints"
    there = tmp_path / "remote/checkpoints"
    number = complete(here)[0][0]
    assert complete(there)[0][0] == number and examine(complete(there)[0][1])[1] == []
    assert not {"LOCK", ".sending/request.json"} & Store(remote.partition("=")[2]).list().keys()
    (complete(there)[0][1] / "manifest.json").unlink()

    done = processes.finish(apart(tmp_path, remote, stages))
    assert [code for code, _, _ in done] == [0, 0], done
    _, out, err = done[0]
    assert "is fetched to" not in err and f"after step {number} of sft" in out, (out, err)
    assert "held_out/loss is best after step " in out and "its weights go on" in out
    assert launch.weights(tmp_path / "machine-0") == launch.weights(tmp_path / "run")


def expire(lock) -> None:
    """Has a lock look as if somebody had waited for it."""
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"expires": 0}))
