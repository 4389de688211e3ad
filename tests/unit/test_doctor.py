"""`rl doctor`: facts about the machine; and the probe of a stage before its first step."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import trajectories

from rl.accounting import memory
from rl.commands import cli
from rl.run.health import doctor
from rl.run.health.prompt_probe import FIRST_ID, probe
from rollout import Completion


def test_the_machine_is_described_without_values_of_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--json"]) == 0
    printed = capsys.readouterr().out
    lines = {line["topic"]: line for line in json.loads(printed)}
    assert (
        "hf_secret" not in printed
        and "HF_TOKEN is set, WANDB_API_KEY is not set" in lines["environment"]["text"]
    )
    assert lines["devices"]["level"] == "ok" and "jax" in lines["versions"]["text"]
    assert "GiB free" in lines["run folder"]["text"]


def test_what_is_short_is_a_warning(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=2**29)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 65536))
    monkeypatch.setattr(doctor.memory, "host", lambda: {"perf/host_memory_share": 0.97})
    levels = {fault.name: fault for fault in doctor.machine(tmp_path / "runs", None)}
    for topic in ("run folder", "shared memory", "open files", "program cache", "host memory"):
        assert levels[topic].level == "warn" and levels[topic].change, topic
    assert levels["open files"].change == "ulimit -n 65536"


def test_host_memory_is_the_fullest_of_machine_and_container(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n"
    )
    assert memory.host(cgroup, proc) == {"perf/host_memory_share": pytest.approx(0.6)}
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("950\n")
    (cgroup / "memory.stat").write_text("anon 10\ninactive_file 50\n")
    assert memory.host(cgroup, proc) == {"perf/host_memory_share": pytest.approx(0.9)}
    (cgroup / "memory.max").write_text("max\n")
    assert memory.host(cgroup, proc) == {"perf/host_memory_share": pytest.approx(0.6)}


def test_the_fullest_device_counts():
    devices = [
        None,
        {"bytes_limit": 100, "peak_bytes_in_use": 40},
        {"bytes_limit": 100, "peak_bytes_in_use": 95},
    ]
    assert memory.share_of(devices) == {"perf/device_memory_share": 0.95}
    assert memory.share_of([None, {}]) == {}


PARAMS = SimpleNamespace(n=2, max_new_tokens=4, stop_token_ids=(2,), stop=("\n",))
TOKENIZER = SimpleNamespace(convert_ids_to_tokens=lambda token: f"<{token}>")


def result_of(totals, finishes, faults=0):
    """Probes two problems whose completions end like this and have these rewards."""
    completions = [Completion([5, 2], [0.0, 0.0], finish, "5") for finish in finishes]
    total = np.asarray(totals, float)
    scores = SimpleNamespace(total=total, names=("exact",), faults=[None] * faults)
    asked = []

    def collect(problems, params, ids):
        asked.extend(ids)
        pending = SimpleNamespace(result=lambda: scores)
        return trajectories.rollouts(problems, ids, [completions[:2], completions[2:]], pending)

    result = probe("grpo", ["a", "b"], PARAMS, collect, TOKENIZER)[0]
    assert asked == [FIRST_ID, FIRST_ID + 1]
    return result


def test_a_probe_that_can_learn():
    result = result_of([1, 0, 1, 1], ["stop", "stop", "length", "stop"])
    assert (result.cut, result.stops, result.reward_mean, result.signal) == (
        0.25,
        {"<2>": 0.75},
        0.75,
        0.5,
    )
    assert result.check() == [] and "<2> 75%; 25% cut off at 4 tokens" in result.lines()[1]


@pytest.mark.parametrize(
    ("totals", "finish", "faults", "illness"),
    [
        ([1, 0, 1, 0], "length", 0, "clipped completions"),
        ([1, 1, 1, 1], "stop", 0, "equal rewards"),
        ([1, np.nan, np.nan, np.nan], "stop", 3, "reward faults"),
        ([np.nan] * 4, "stop", 0, "no scores"),
    ],
)
def test_a_probe_that_cannot_learn(totals, finish, faults, illness):
    said = result_of(totals, [finish] * 4, faults).check()
    assert [fault.name for fault in said] == [illness]


def test_a_remote_folder_is_written_to_and_left_as_it_was(tmp_path):
    good = doctor.remote(f"file://{tmp_path}/remote")
    assert good.level == "note" and "can be written, read and listed" in good.text
    assert list((tmp_path / "remote").iterdir()) == []
    (tmp_path / "file").touch()
    bad = doctor.remote(f"file://{tmp_path}/file/remote")
    assert bad.level == "refuse" and "remote folder: " in doctor.line(bad)
    assert "is no scheme that fsspec knows" in doctor.remote("s4://bucket/run").text
