"""A run with a remote folder: killed, it goes on in an empty folder to the bits of a run that nothing
disturbed."""

import json
import shutil

import launch
import pytest

from rl.records.run_files import attempts


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
