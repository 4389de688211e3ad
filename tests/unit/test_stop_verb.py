"""`rl stop` on folders of runs: what it asks, says and returns, and what the next start does with a
stopped run."""

import json
import socket
import threading
import time

import pytest
from test_folder import begun, config

from rl.commands import cli
from rl.commands.runs import stop as stop_verb
from rl.errors import ConfigError, ResourceError
from rl.records import run_files
from rl.run.folder import RunFolder
from rl.run.unfinished import stop
from rl.run.unfinished.checkpoints import chosen


@pytest.fixture
def run(tmp_path):
    """A run whose last step is the second of grpo."""
    begun(tmp_path)
    event = {"stage": "grpo", "step": 2, "time": 1.0, "metrics": {}}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + '\n{"stage": "grpo", "st')
    attempt(tmp_path)
    return tmp_path


def attempt(run, **facts) -> None:
    """Writes the last attempt of a run: one that goes on, or was killed, without `end` and
    `exit_code`."""
    entry = {"start": 1.0, "host": socket.gethostname()} | facts
    (run / "run.json").write_text(json.dumps({"attempts": [entry]}))


def export(directory) -> None:
    directory.mkdir(parents=True)
    (directory / "weights").write_text(str(time.time()))


def rl_stop(run, *more: str) -> int:
    return cli.main(["stop", str(run), *more])


def goes_on(run, end) -> threading.Thread:
    """A process that holds the folder until it is asked to stop; `end(folder)` then ends it."""
    entered = threading.Event()

    def hold():
        with RunFolder(config(run)) as folder:
            entered.set()
            while not stop.is_asked(run):
                time.sleep(0.01)
            end(folder)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    return thread


def test_a_running_run_is_asked_and_waited_for(run, capsys):
    def end(folder):
        time.sleep(0.3)
        folder.export(export, stopped=stop.StoppedAt("grpo", 3))
        attempt(run, end=2.0, exit_code=0, stopped={"stage": "grpo", "step": 3})

    (run / stop.REQUEST).touch()  # left over: the start removes it
    thread = goes_on(run, end)
    assert rl_stop(run) == 0
    thread.join()
    asked, told = capsys.readouterr().out.splitlines()
    assert asked.startswith(
        f"{run} is asked to stop after its step (the last one was step 2 of grpo)"
    )
    assert told.startswith(
        f"{run} is stopped after step 3 of grpo: its weights are in {run}/export"
    )
    assert not stop.is_asked(run) and run_files.attempts(run, [])[-1].stopped == "step 3 of grpo"
    assert rl_stop(run) == 0 and "is stopped after step 3 of grpo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "code", "said"),
    [
        ({"end": 2.0, "exit_code": 4}, 4, "did not stop as asked: it ended with exit code 4"),
        ({"end": 2.0, "exit_code": 0}, 0, "is finished: its final weights are in"),
        ({}, 76, "was killed before it stopped; `rl-train"),
    ],
)
def test_a_run_that_ends_otherwise_is_told_apart(run, capsys, facts, code, said):
    thread = goes_on(run, lambda folder: attempt(run, **facts))
    assert rl_stop(run) == code
    thread.join()
    assert said in "".join(capsys.readouterr())


def test_a_run_killed_after_its_export_appeared_is_stopped(run, capsys):
    thread = goes_on(run, lambda folder: folder.export(export, stopped=stop.StoppedAt("grpo", 3)))
    assert rl_stop(run) == 0
    thread.join()
    assert f"{run} is stopped after step 3 of grpo" in capsys.readouterr().out


def test_a_request_that_was_withdrawn_is_said_while_the_run_goes_on(run, capsys, monkeypatch):
    monkeypatch.setattr(stop_verb, "_GONE_S", 0.3)
    told = threading.Event()

    def end(folder):
        stop.withdraw(run)
        assert told.wait(30)

    thread = goes_on(run, end)
    code = rl_stop(run)
    told.set()
    thread.join()
    assert code == 2
    assert (
        f"{run}/stop.request is gone, and the run goes on: the request was withdrawn"
        in capsys.readouterr().err
    )


def test_without_waiting_only_the_request_is_written(run, capsys):
    thread = goes_on(run, lambda folder: None)
    assert rl_stop(run, "--no-wait") == 0
    thread.join()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_runs_that_are_not_running_are_named(run, tmp_path, capsys):
    assert rl_stop(run / "nothing") == 2 and "no such folder" in capsys.readouterr().err
    for facts, said in (
        ({}, "it was killed"),
        ({"end": 2.0, "exit_code": 75}, "it ended with exit code 75"),
    ):
        attempt(run, **facts)
        assert rl_stop(run) == 2
        assert (
            f"{run} is not running: {said}. `rl-train {run}` continues it"
            in capsys.readouterr().err
        )
    export(run / "export")
    assert rl_stop(run) == 0 and f"{run} is finished" in capsys.readouterr().out
    assert not stop.is_asked(run)


def test_samples_without_training_are_not_stopped(run, capsys):
    """`rl rollout` does not look for the request."""
    (run / run_files.ROLLOUTS).write_text("{}")
    thread = goes_on(run, lambda folder: None)
    code = rl_stop(run)
    asked = stop.is_asked(run)
    stop.ask(run)  # ends the thread
    thread.join()
    assert code == 2 and not asked
    assert f"{run} holds samples of `rl rollout`" in capsys.readouterr().err


def test_a_run_on_another_machine_is_asked_although_its_lock_is_not_seen(run, capsys):
    attempt(run, host="elsewhere")

    def end():
        while not stop.is_asked(run):
            time.sleep(0.01)
        export(run / "export")
        attempt(run, host="elsewhere", end=2.0, exit_code=0)

    thread = threading.Thread(target=end)
    thread.start()
    assert rl_stop(run) == 0
    thread.join()
    assert "it was started on elsewhere; if it was killed there" in capsys.readouterr().out


def test_a_folder_in_use_keeps_its_request(run):
    with RunFolder(config(run)):
        stop.ask(run)
        with pytest.raises(ResourceError, match="in use"), RunFolder(config(run)):
            pass
        assert stop.is_asked(run) and stop.in_use(run)
    assert not stop.is_asked(run) and not stop.in_use(run)


def test_the_next_start_keeps_the_weights_of_a_stopped_run_under_its_step(tmp_path):
    begun(tmp_path)
    for stage, step in (("sft", 2), ("grpo", 1), ("grpo", 1)):
        with RunFolder(config(tmp_path)) as folder:
            assert not folder.finished
            folder.begin()
            folder.export(export, stopped=stop.StoppedAt(stage, step))
            assert folder.finished
        weights = (tmp_path / "export" / "weights").read_text()
    with RunFolder(config(tmp_path)) as folder:
        folder.begin()
        assert not folder.finished and stop.stopped(tmp_path) is None
        folder.export(export)
    assert sorted(path.name for path in tmp_path.glob("export*")) == [
        "export",
        "export-grpo-1",
        "export-sft-2",
    ]
    assert (tmp_path / "export-grpo-1" / "weights").read_text() == weights
    with RunFolder(config(tmp_path)) as folder:
        assert folder.finished


def test_a_stopped_run_that_gets_more_steps_keeps_its_weights_under_the_step_of_its_stop(tmp_path):
    begun(tmp_path)
    with RunFolder(config(tmp_path)) as folder:
        folder.export(export, stopped=stop.StoppedAt("grpo", 1))
    stages = [{"algorithm": "sft", "steps": 2}, {"algorithm": "grpo", "steps": 5}]
    with RunFolder(config(tmp_path, stages=stages)) as folder:
        assert not folder.finished
        folder.begin()
    assert [path.name for path in tmp_path.glob("export*")] == ["export-grpo-1"]


def test_a_run_killed_before_its_export_appeared_is_no_stopped_run(tmp_path):
    begun(tmp_path)
    stop.write_stopped(tmp_path, stop.StoppedAt("grpo", 1))
    with RunFolder(config(tmp_path)) as folder:
        folder.begin()
        assert not folder.finished and stop.stopped(tmp_path) is None


def test_an_export_of_the_best_step_is_not_offered_as_that_of_the_last(tmp_path):
    best = {"metric": "eval/greedy_accuracy", "mode": "max"}
    (tmp_path / "export-grpo-3").mkdir()
    for take, offered in (("last", True), ("best", False)):
        stages = [{"algorithm": "grpo", "steps": 3, "best": best | {"take": take}}]
        with pytest.raises(ConfigError) as error:
            chosen_at_3(tmp_path, stages)
        assert ("export-grpo-3 holds these weights" in str(error.value)) == offered
    attempt(
        tmp_path, end=2.0, exit_code=0, stopped={"stage": "grpo", "step": 3}
    )  # by `rl stop`, of that step
    with pytest.raises(ConfigError, match="export-grpo-3 holds these weights"):
        chosen_at_3(tmp_path, stages)


def chosen_at_3(run, stages):
    (run / "checkpoints" / "0000000002").mkdir(parents=True, exist_ok=True)
    host = {"stage": 0, "step": 2, "steps": 3}
    (run / "checkpoints" / "0000000002" / "host.json").write_text(json.dumps(host))
    return chosen(run, config(run, stages=stages), "grpo:3")
