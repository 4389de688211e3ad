import itertools
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from rl.config.run import RunConfig
from rl.errors import ResourceError
from rl.records.events import EventLog, Events, read
from rl.records.run_files import EVENTS, SAMPLES, TOKENS
from rl.records.samples import TOKEN
from rl.records.trackers import mirrors
from rl.run.steps.remaining_time import RemainingTime

STAGES = ["sft", "grpo"]


def config(steps=(2, 3), **run) -> RunConfig:
    stages = [{"algorithm": "sft", "steps": steps[0]}, {"algorithm": "grpo", "steps": steps[1]}]
    return RunConfig.model_validate({"model": "tiny", "stages": stages, "run": run})


def filled(directory: Path) -> EventLog:
    log = EventLog(directory)
    for stage, step in [("sft", 0), ("sft", 1), ("sft", 2), ("grpo", 0), ("grpo", 1), ("grpo", 2)]:
        log.step(stage, step, {"loss": step / 3})
        sample = {
            "stage": stage,
            "step": step,
            "prompt_id": 7,
            "completion": "é\u2028x",
            "n_prompt": 1,
            "n": 2,
        }
        log.samples([{**sample, "sample": n} for n in range(2)], [np.full(3, step, TOKEN)] * 2)
    return log


def places(path: Path) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in read(path)]


def test_a_step_is_one_line_of_strict_json_with_every_digit(tmp_path):
    log = EventLog(tmp_path)
    value = 0.1 + 0.2
    metrics = {
        "a": value,
        "b": float("nan"),
        "c": np.float32(0.1),
        "d": np.arange(2),
        "e": -np.inf,
        "f": None,
    }
    log.step("sft", 1, metrics)
    log.samples([{"prompt_id": 0, "completion": "\ud800 half a pair"}], [np.zeros(0, TOKEN)])
    text = (tmp_path / EVENTS).read_text()
    assert text.endswith("\n") and text.count("\n") == 1
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["metrics"] == {
        "a": value,
        "b": None,
        "c": float(np.float32(0.1)),
        "d": [0, 1],
        "e": None,
        "f": None,
    }
    assert abs(row["time"] - time.time()) < 60
    assert read(tmp_path / SAMPLES) == [{"prompt_id": 0, "completion": "? half a pair", "at": 0}]


def test_resuming_drops_what_is_later_than_the_checkpoint_and_a_torn_line(tmp_path):
    log = filled(tmp_path)
    kept = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)[:5]
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"stage": "grpo", "st')
    log.truncate_after(STAGES, "grpo", 1)
    assert (tmp_path / EVENTS).read_bytes() == b"".join(kept)
    assert places(tmp_path / SAMPLES)[-2:] == [("grpo", 1), ("grpo", 1)]
    log.step("grpo", 2, {"loss": 1.0})
    assert places(tmp_path / EVENTS)[-2:] == [("grpo", 1), ("grpo", 2)]
    log.truncate_after(STAGES, "sft", 1)
    assert places(tmp_path / EVENTS) == [("sft", 0), ("sft", 1)]
    assert sorted(os.listdir(tmp_path)) == [EVENTS, SAMPLES, TOKENS]


def test_truncation_leaves_the_old_file_when_it_is_killed_before_the_replacement(
    tmp_path, monkeypatch
):
    log = filled(tmp_path)
    before = (tmp_path / EVENTS).read_bytes()

    def killed(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.truncate_after(STAGES, "sft", 0)
    assert (tmp_path / EVENTS).read_bytes() == before
    monkeypatch.undo()
    EventLog(tmp_path).truncate_after(STAGES, "sft", 0)
    assert places(tmp_path / EVENTS) == [("sft", 0)]


def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path):
    log = filled(tmp_path)
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(b"".join([lines[0], lines[1][:9] + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"events.jsonl:2: damaged line"):
        log.truncate_after(STAGES, "grpo", 1)
    with pytest.raises(ValueError, match=r"events.jsonl:2"):
        read(tmp_path / EVENTS)


def test_a_pipe_gets_plain_lines_every_few_steps_and_for_evaluations_and_the_last(tmp_path, capsys):
    events = Events(config((2, 5), log_every=2), tmp_path)
    events.start_stage("grpo", 5)
    for step in range(1, 6):
        extra = {"eval/greedy_accuracy": 0.25} if step == 3 else {}
        events.step(
            "grpo", step, {"loss": 1e-9, "reward/mean": np.float32(0.5), "time/step": 0.41, **extra}
        )
    events.note("saved")
    events.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "grpo 2/5  reward/mean 0.500  loss 1.00e-09  0.4s"
    assert [line.split("  ")[0] for line in lines] == [
        "stage grpo: 5 steps",
        *(f"grpo {n}/5" for n in (2, 3, 4, 5)),
        "saved",
    ]
    assert "eval/greedy_accuracy 0.250" in lines[2]


def test_a_terminal_gets_a_progress_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    events = Events(config(), tmp_path)
    events.step("grpo", 0, {"eval/greedy_accuracy": 0.25})
    events.start_stage("grpo", 3)
    events.step("grpo", 1, {"reward/mean": 0.5})
    events.note("saved [step 1]")
    events.close()
    said = capsys.readouterr().out
    assert "eval/greedy_accuracy 0.250" in said and "saved [step 1]" in said and "1/3" in said


def test_a_terminal_of_80_columns_cuts_no_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    events = Events(config((1, 40)), tmp_path)
    events.start_stage("grpo", 40, 7)
    names = (
        "reward/mean",
        "kl/ref",
        "entropy",
        "completion/mean_length",
        "sampler/logp_diff_max",
        "loss",
    )
    events.step("grpo", 8, dict.fromkeys(names, 0.5) | {"time/step": 0.4})
    events.close()
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", each).strip()
        for each in capsys.readouterr().out.splitlines()
    ]
    bar, metrics = next((a, b) for a, b in itertools.pairwise(lines) if "8/40" in a)
    assert bar.startswith("grpo") and "time left" in bar and len(bar) <= 80
    assert metrics == "reward/mean 0.500  kl/ref 0.500  entropy 0.500  completion/mean_length 0.500"


def test_the_time_left_is_that_of_the_median_of_three_steps():
    estimate, step = (
        RemainingTime(),
        {"perf/step_tokens_per_s": 4940.0, "perf/step_tflops_per_s": 0.012},
    )
    seconds = [46.0, 9.0, 1.0, 30.0, 2.0, 1.0]
    texts = [
        estimate.after_step(step | {"time/step": s, "time/sample": s / 2}, 10 - n)
        for n, s in enumerate(seconds, 1)
    ]
    assert [bool(text) for text in texts] == [False] * 4 + [True, False]
    assert (
        texts[4]
        == "a step takes 2 s (sample 50%; 4,940 tokens/s and 12.0 GFLOP/s per device); 5 more: "
        "about 0:00:10"
    )


def test_tensorboard_counts_steps_through_all_stages(tmp_path):
    events = Events(config((2, 1), tensorboard=True), tmp_path)
    for stage, step in (("sft", 0), ("sft", 1), ("sft", 2), ("grpo", 0)):
        events.step(stage, step, {"loss": step / 2, "nothing": float("nan")})
    events.close()
    events = Events(config((2, 1), tensorboard=True), tmp_path)
    events.start_stage("grpo", 1, 0)
    events.step("grpo", 1, {"loss": 0.5})
    events.close()
    assert tensorboard_scalars(tmp_path) == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.0), (4, 0.5)]


def tensorboard_scalars(directory):
    """Returns (step, value) of every scalar in the TensorBoard files of a run, sorted."""
    from tensorboardX.proto.event_pb2 import Event

    data, result = b"".join(file.read_bytes() for file in (directory / "tensorboard").iterdir()), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        result += [(event.step, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    return sorted(result)


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path):
    stages = ["sft", "grpo"]
    events = Events(config((3, 1), tensorboard=True), tmp_path)
    events.truncate_after(stages, "sft", -1)
    for step in (1, 2, 3):
        events.step("sft", step, {"loss": 1.0})
    events.close()
    torn = next((tmp_path / "tensorboard").iterdir())
    torn.write_bytes(torn.read_bytes() + b"\x20\0\0")  # as a kill leaves it
    for first in (1, 2):
        events = Events(config((3, 1), tensorboard=True), tmp_path)
        events.truncate_after(stages, "sft", first)
        for step in range(first + 1, 4):
            events.step("sft", step, {"loss": 2.0})
        events.close()
    assert tensorboard_scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 2.0)]
    events = Events(config((3, 1), tensorboard=True), tmp_path)
    events.truncate_after(stages, "sft", -1)
    events.close()
    assert tensorboard_scalars(tmp_path) == []


def test_a_failing_mirror_warns_once_and_the_record_goes_on(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, stages, directory):
            pass

        def start_stage(self, *arguments):
            pass

        def step(self, *arguments):
            raise OSError("disk full")

    monkeypatch.setattr(mirrors, "TensorBoard", Broken)
    events = Events(config(tensorboard=True), tmp_path)
    events.start_stage("sft", 2)
    with pytest.warns(UserWarning, match="TensorBoard failed.*disk full"):
        events.step("sft", 1, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events.step("sft", 2, {"loss": 2.0})
        events.close()
    assert places(tmp_path / EVENTS) == [("sft", 1), ("sft", 2)]


@pytest.mark.slow
def test_wandb_offline_needs_no_account_and_writes_to_the_run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    events = Events(config(wandb={"project": "p"}), tmp_path)
    events.start_stage("sft", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        events.step("sft", 1, {"loss": 0.5})
        events.close()
        Events(config(wandb={"project": "p"}), tmp_path).close()
    (identity,) = {
        path.stem.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*/*.wandb")
    }
    assert identity == (tmp_path / "wandb-id").read_text()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_repeated_stages_get_numbers():
    stages = [{"algorithm": name, "steps": 1} for name in ("sft", "grpo", "sft", "sft")]
    assert RunConfig.model_validate({"model": "tiny", "stages": stages}).stage_names == [
        "sft",
        "grpo",
        "sft-2",
        "sft-3",
    ]


def test_lines_wait_for_room_on_a_full_disk_and_lose_nothing(tmp_path, monkeypatch, caplog):
    log, write, room = EventLog(tmp_path), os.write, [30]

    def limited(file, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = write(file, bytes(data[: room[0]]))
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    for step in range(3):
        log.step("sft", step, {"loss": 1.0})
    assert (
        not log.sync()
        and "No space left" in caplog.text
        and caplog.text.count("kept in memory") == 1
    )
    assert re.search(
        rf"{re.escape(str(tmp_path))} has [\d.,]+ [KMG]iB free of [\d.,]+ bytes that are needed",
        caplog.text,
    )
    assert (tmp_path / EVENTS).stat().st_size == 30
    room[0] = 10**6
    log.step("sft", 3, {"loss": 1.0})
    assert log.sync()
    assert [step for _, step in places(tmp_path / EVENTS)] == [0, 1, 2, 3]


def test_a_record_that_cannot_be_cut_back_on_a_full_disk_stays_as_it_is(tmp_path, monkeypatch):
    log = EventLog(tmp_path)
    for step in range(3):
        log.step("sft", step, {"loss": 1.0})
    before = (tmp_path / EVENTS).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            ResourceError, match="No space left on device. Make room, then `rl-train"
        ):
            log.truncate_after(["sft"], "sft", 1)
        patched.setattr(os, "write", full)
        log.step("sft", 3, {"loss": 1.0})
        log.close()
    assert (tmp_path / EVENTS).read_bytes() == before and not list(tmp_path.glob("*.new"))
    log = EventLog(tmp_path)
    log.truncate_after(["sft"], "sft", 1)
    log.close()
    assert [step for _, step in places(tmp_path / EVENTS)] == [0, 1]
