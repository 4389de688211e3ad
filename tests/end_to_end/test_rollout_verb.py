"""`rl rollout`: the samples of a run without training."""

import json
import os
import signal
from types import SimpleNamespace

import launch
import numpy as np
import pytest
from test_asking_algorithms import DENSE, stage

from rl.commands import cli
from rl.commands import rollout as verb
from rl.errors import ResourceError
from rl.records import events, run_files, samples
from rl.run import rollout
from rl.training import trainer

REWARDS = "rewards={functions: [tests/end_to_end/own_rewards.py:seldom], workers: 1}"
# An update of this rate is lost in rounding: training keeps the first weights.
STILL = {"optimizer": {"learning_rate": 1e-30}}


def given(*stages):
    return (*DENSE, f"stages={json.dumps(list(stages))}", REWARDS)


def one(name="grpo", **more):
    return stage(name, steps=2) | STILL | more


SUPERVISED = one("sft", samples_per_prompt=1, max_logp_diff=None)


def sampled(directory, *more):
    return cli.main(["rollout", *launch.arguments(directory, *more)])


def lines(directory):
    """The samples without what follows from updates."""
    apart = {"advantage", "version", "at"}
    return [
        {key: value for key, value in line.items() if key not in apart}
        for line in samples.read(directory)
        if not line.get("eval")
    ]


def tokens(directory):
    """Ids and log-probabilities of all samples."""
    all_ = np.fromfile(directory / "tokens.bin", samples.TOKEN)
    return all_["id"].tolist(), all_["logp"].tobytes()


@pytest.mark.slow
def test_the_samples_are_those_of_a_run_whose_weights_stay(tmp_path, capsys, monkeypatch):
    """Two steps of two stages, bit for bit. Both stages have a reference model when they train."""
    first, run = tmp_path / "first", tmp_path / "run"
    settings = given(SUPERVISED, one(), one("rloo"))
    assert launch.train(run, *settings) == 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "__init__", None)  # no optimizer, critic or reference
        assert sampled(first, *settings) == 0
    assert "sft samples nothing: left out" in capsys.readouterr().out
    assert len(lines(first)) == 2 * 2 * 16 and lines(first) == lines(run)
    assert tokens(first) == tokens(run)
    assert all(line["advantage"] is None for line in samples.read(first))
    assert not (first / "export").exists() and not (first / "checkpoints").exists()
    theirs = {
        (row["stage"], row["step"]): row["metrics"] for row in events.read(run / "events.jsonl")
    }
    ours = events.read(first / "events.jsonl")
    assert len(ours) == 4
    for row in ours:
        metrics = theirs[row["stage"], row["step"]]
        for key in row["metrics"]:
            assert key in metrics, key
            if key.startswith(("reward/", "completion/", "data/")):
                assert row["metrics"][key] == metrics[key], key
    for arguments in (["report", first], ["explain", first], ["samples", first, "reward<1"]):
        assert cli.main([str(word) for word in arguments]) == 0
    assert cli.main(["compare", str(first), str(run), "--text"]) == 0
    before = (first / "samples.jsonl").read_bytes()
    capsys.readouterr()
    assert sampled(first, *settings) == 0
    assert f"{first} is finished" in capsys.readouterr().out
    assert (first / "samples.jsonl").read_bytes() == before
    # A run trains on them, and a curriculum reads their rates.
    trained = given(one("rloo", rollouts=str(first)))
    assert launch.train(tmp_path / "again", *trained) == 0
    assert lines(tmp_path / "again") == [line for line in lines(first) if line["stage"] == "rloo"]
    curriculum = {"name": "pass_rate", "options": {"rollouts": str(first)}}
    arguments = launch.arguments(tmp_path / "rated", *given(one(curriculum=curriculum)))
    assert cli.train_main([*arguments, "--check"]) == 0
    assert "rows are left out" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_call_goes_on_after_the_last_complete_step(tmp_path, capsys, monkeypatch):
    """With groups that dynamic sampling carries over from step to step."""
    settings = given(one("dapo", steps=3), one())
    assert sampled(tmp_path / "uninterrupted", *settings) == 0
    write = rollout.LastStep.write

    def write_and_stop(last, folder):
        write(last, folder)
        if last.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    parts = tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(rollout.LastStep, "write", write_and_stop)
        assert sampled(parts, *settings) == 75
    assert "SIGINT: the samples up to step 1 of dapo are written" in capsys.readouterr().err
    after_first = (parts / run_files.ROLLOUTS).read_text()
    assert json.loads(after_first)["progress"]["producer"]["carried"]
    assert cli.main(["rollout", str(parts)]) == 0
    # As after a kill: the records have steps that the file does not know.
    (parts / run_files.ROLLOUTS).write_text(after_first)
    assert cli.main(["rollout", str(parts)]) == 0
    for name in ("samples.jsonl", "tokens.bin"):
        assert (parts / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes(), name
    assert [row["step"] for row in events.read(parts / "events.jsonl")] == [1, 2, 3, 1, 2]


def test_refusals(tmp_path, capsys, monkeypatch):
    """Before anything is read, and with --check."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("")
    cases = {
        "is the folder of a training run": (folder, given(one())),
        "no stage samples new completions; the stages are: sft": (
            tmp_path / "new",
            given(SUPERVISED),
        ),
    }
    for message, (directory, settings) in cases.items():
        for check in ((), ("--check",)):
            assert sampled(directory, *settings, *check) == 2
            assert message in capsys.readouterr().err
    # Training would remove the samples.
    (folder / run_files.ROLLOUTS).write_text("{}")
    for check in ((), ("--check",)):
        assert cli.train_main([*launch.arguments(folder, *given(one())), *check]) == 2
        assert "holds samples of `rl rollout`" in capsys.readouterr().err
    last = {"stage": 0, "step": 1, "progress": {"seen": 3}}
    (folder / run_files.ROLLOUTS).write_text(json.dumps(last))
    assert sampled(folder, *given(one()), "--check") == 4
    written = f"{folder / run_files.ROLLOUTS} was written by another version of Duet: of the run's"
    assert written in capsys.readouterr().err
    assert sampled(tmp_path / "good", *given(one()), "--check") == 0
    assert "the configuration is good" in capsys.readouterr().out
    monkeypatch.setattr("rl.cluster.launch.launch", lambda *given: object())
    assert sampled(tmp_path / "new", *given(one())) == 2
    assert "runs in one process" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_signal_after_a_step_without_room_is_no_plain_stop(tmp_path):
    run = SimpleNamespace(
        stop=SimpleNamespace(received="SIGTERM"), folder=SimpleNamespace(path=tmp_path)
    )
    with pytest.raises(ResourceError, match="SIGTERM: NOT written .* after step 2 of grpo") as told:
        rollout._stop_if_asked(run, SimpleNamespace(name="grpo"), 2, written=False)
    assert told.value.exit_code == 5 and f"rl rollout {tmp_path}" in str(told.value)


def test_folders_are_not_those_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-1", "tiny-rollouts-4"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert verb._new_directory(["tiny.yml"]) == "runs/tiny-rollouts-5"
