"""A run with a remote folder: killed, it goes on in an empty folder to the bits of a run that nothing
disturbed."""

import json
import shutil
import signal

import launch
import pytest
import test_processes as processes

from rl.records.run_files import attempts
from rl.remote.store import Store
from rl.run.manifest import complete


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
