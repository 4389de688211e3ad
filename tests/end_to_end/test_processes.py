"""One run over several processes of this machine: the numbers of one process with as many devices,
and what a death leaves.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import launch
import numpy as np
import pytest

import policy
from rl.errors import ProcessLost
from rl.records import events
from rl.run.unfinished import stop
from rl.run.unfinished.weights import CheckpointWeights

# Sums of gradients are added up in another order; an eps of 1e-8 would make a step of the learning
# rate of the difference.
LEARN = {"optimizer": {"learning_rate": 1e-3, "eps": 1e-4}, "sampling": {"max_new_tokens": 6}}
SFT = {"algorithm": "sft", "prompts_per_step": 8, "steps": 2, **LEARN}
GRPO = {
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "steps": 3,
    **LEARN,
}
REWARD = "rewards.functions=[tests/end_to_end/own_rewards.py:counted]"
RUN = (*launch.LIGHT, "run.checkpoint_every=1", f"stages={json.dumps([GRPO])}", REWARD)
BOTH = ("mesh.fsdp=2", "mesh.tensor=2", f"stages={json.dumps([SFT, GRPO])}")


def address() -> str:
    """A port of this machine that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def on_devices(number: int) -> dict[str, str]:
    return {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={number}"
    }


def start(directory, processes: int, devices: int, *more: str) -> list:
    """`rl-train` in so many processes of so many devices each; with several devices, weights are
    resharded for decoding."""
    environment = on_devices(devices) | {"COUNTED": str(directory.parent / "counted")}
    if processes == 1:
        return [launch.process(*launch.arguments(directory, *RUN, *more), environment=environment)]
    more = (*more, "generator.rules=stationary")
    join = ["--processes", str(processes), "--coordinator", address()]
    return [
        launch.process(
            *launch.arguments(directory, *RUN, *more),
            *join,
            "--process",
            str(i),
            environment=environment,
        )
        for i in range(processes)
    ]


def finish(running: list) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    return [launch.finish(one) for one in running]


@pytest.fixture(autouse=True)
def none_left(monkeypatch):
    """A test that fails leaves no process that waits for others."""
    started, begin = [], subprocess.Popen

    def popen(*given, **how):
        started.append(begin(*given, **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.communicate()


def assert_same_numbers(one, other) -> None:
    for ours, theirs in zip(launch.numbers(one), launch.numbers(other), strict=True):
        assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
        for name, value in theirs[2].items():
            relative = 0 if name == "loss" else 1e-5
            np.testing.assert_allclose(
                ours[2][name], value, rtol=relative, atol=1e-6, err_msg=f"{ours[:2]} {name}"
            )


def alone(directory, *more: str):
    """A run of one process with four devices."""
    [(code, _, err)] = finish(start(directory, 1, 4, *more))
    assert code == 0, err
    return directory


@pytest.mark.slow
def test_a_run_that_loses_a_process_goes_on_to_the_numbers_of_one_process(tmp_path):
    directory = tmp_path / "run"
    first, second = running = start(directory, 2, 2)
    launch.wait_for(lambda: launch.lines(directory) >= 2, first)
    os.killpg(second.pid, signal.SIGKILL)
    died = time.monotonic()
    (code, out, err), _ = finish(running)
    assert time.monotonic() - died < 30
    assert (
        code == ProcessLost.exit_code and "process 1 of 2" in err and f"pid {second.pid}" in err
    ), err

    (tmp_path / "counted").unlink(missing_ok=True)
    running = start(directory, 2, 2)
    (code, out, err), (other, silent, said) = finish(running)
    assert code == other == 0, (err, said)
    assert said == "" and all(
        line.startswith("[Gloo]") for line in silent.splitlines()
    )  # which jax has printed
    step = int(re.search(rf"continuing {directory} after step (\d) of grpo", out)[1])
    # Every completion was scored once, half of them by each process.
    scored = Counter(map(int, (tmp_path / "counted").read_text().split()))
    assert scored == {process.pid: 8 * (3 - step) for process in running}
    assert_same_numbers(directory, alone(tmp_path / "alone"))
    metrics = [row["metrics"] for row in events.read(directory / "events.jsonl")]
    assert all(each["time/sync"] > 0 and each["perf/shared_prefix"] > 1 for each in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_falls_silent_ends_the_other(tmp_path, stopped):
    """It is there, and its connections stay open, but it does nothing: as where a machine hangs."""
    directory = tmp_path / "run"
    running = start(directory, 2, 2, f"stages={json.dumps([GRPO | {'steps': 60}])}")
    launch.wait_for(lambda: launch.lines(directory) >= 2, running[0])
    os.killpg(running[stopped].pid, signal.SIGSTOP)
    began = time.monotonic()
    code, _, err = launch.finish(running[1 - stopped], timeout=60)
    assert time.monotonic() - began < 30
    assert code == ProcessLost.exit_code, err
    assert (
        f"process {stopped} of 2 ({socket.gethostname()}, pid {running[stopped].pid}) has been "
        "silent" in err
    ), err


@pytest.mark.slow
def test_four_processes_stop_together_and_outlive_their_first(tmp_path):
    directory = tmp_path / "run"
    running = start(directory, 4, 1, *BOTH)
    launch.wait_for(lambda: launch.lines(directory) >= 1, running[0])
    running[3].send_signal(signal.SIGTERM)
    done = finish(running)
    assert [code for code, _, _ in done] == [75] * 4, done
    running = start(directory, 4, 1, *BOTH)
    launch.wait_for(lambda: launch.lines(directory) >= 3, running[0])
    os.killpg(running[0].pid, signal.SIGKILL)
    for code, _, err in finish(running)[1:]:
        assert (
            code == ProcessLost.exit_code
            and f"process 0 of 4 ({socket.gethostname()}, pid {running[0].pid})" in err
        ), err
    done = finish(start(directory, 4, 1, *BOTH))
    assert [code for code, _, _ in done] == [0] * 4, done
    assert_same_numbers(directory, alone(tmp_path / "alone", *BOTH))


@pytest.mark.slow
def test_processes_stop_at_the_same_step_with_one_export_and_go_on(tmp_path):
    directory = tmp_path / "run"
    running = start(directory, 2, 2)
    launch.wait_for(lambda: launch.lines(directory) >= 1, running[0])
    stop.ask(directory)
    done = finish(running)
    assert [code for code, _, _ in done] == [0, 0], done
    place = stop.stopped(directory)
    assert f"stopped after step {place.step} of grpo" in done[0][1] and place.step < 3
    assert policy.load(directory / "export").params
    done = finish(start(directory, 2, 2))
    assert [code for code, _, _ in done] == [0, 0], done
    assert f"continuing {directory} after step {place.step} of grpo" in done[0][1]
    assert_same_numbers(directory, alone(tmp_path / "alone"))
    read = CheckpointWeights(directory, "3").load("float32").params  # of 4 devices, on one
    for path, array in policy.load(directory / "export").params.items():
        np.testing.assert_array_equal(array, read[path])


@pytest.mark.slow
def test_a_process_reads_of_a_directory_and_of_a_checkpoint_what_its_devices_hold(tmp_path):
    model = policy.create("tiny-deepseek", dtype="float32")
    policy.save(model, tmp_path / "model")
    script, coordinator = launch.ROOT / "tests" / "end_to_end" / "load_on_processes.py", address()
    given = [
        [sys.executable, str(script), str(tmp_path / "model"), "2", str(i), coordinator]
        for i in range(2)
    ]
    how = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | on_devices(2),
    }
    done = finish(
        [subprocess.Popen(each, cwd=launch.ROOT, start_new_session=True, **how) for each in given]
    )
    assert [code for code, _, _ in done] == [0, 0], done
    result = [json.loads(out.splitlines()[-1]) for _, out, _ in done]
    for each in result:
        assert each["weights"] == sum(array.nbytes for array in model.params.values())
        # Devices of a process share the reading of what both hold; norms and routers are held by
        # all.
        assert (
            each["read"] <= each["held"] < 0.6 * each["weights"]
            and each["restored"] < 0.6 * each["weights"]
        ), each
    assert result[0]["read"] + result[1]["read"] < 1.1 * result[0]["weights"]


@pytest.mark.slow
def test_processes_change_a_run_in_the_same_step_and_repeat_it(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert [end[0] for end in finish(start(one, 2, 1, f"stages={json.dumps([SFT])}"))] == [0, 0]
    changed = {**SFT, "steps": 4, "optimizer": {**SFT["optimizer"], "learning_rate": 1e-4}}
    ends = finish(start(one, 2, 1, f"stages={json.dumps([changed])}"))
    assert [end[0] for end in ends] == [0, 0], ends
    assert "from step 3 of sft on: stages.0.optimizer.learning_rate: 0.001 -> 0.0001" in ends[0][1]
    join = ["--processes", "2", "--coordinator", address()]
    repeated = [str(one / "config.yml"), f"run.dir={other}", *join]
    running = [
        launch.process(*repeated, "--process", str(i), environment=on_devices(1)) for i in range(2)
    ]
    assert [end[0] for end in finish(running)] == [0, 0]
    launch.assert_same_run(one, other)
