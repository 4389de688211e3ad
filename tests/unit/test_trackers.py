"""Trackers have each step of a run once, whatever became of the runs and of the trackers before."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings

import pytest

from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.records.events import EventLog, Events, read
from rl.records.run_files import EVENTS
from rl.records.trackers import sender
from rl.records.trackers.mirror import stage_steps
from rl.records.trackers.mlflow_tracker import by_valid_name, flattened, requests
from rl.records.trackers.sender import Point, Sender
from rl.run.load import load

STAGES = ["sft", "grpo"]


def config(steps=(2, 3), **run) -> RunConfig:
    stages = [{"algorithm": "sft", "steps": steps[0]}, {"algorithm": "grpo", "steps": steps[1]}]
    return RunConfig.model_validate({"model": "tiny", "stages": stages, "run": run})


class Kept:
    """A tracker in memory, whose points outlive the sender."""

    def __init__(self):
        self.points = []
        self.ends = []
        self.answers = threading.Event()
        self.answers.set()

    def open(self):
        return max((point.at for point in self.points), default=-1)

    def log(self, points):
        self.answers.wait()
        self.points += points

    def close(self, finished):
        self.ends.append(finished)


def started(tracker, directory) -> tuple[EventLog, Sender]:
    return EventLog(directory), Sender(tracker, stage_steps(config()), directory / EVENTS)


def do(log, sent, stage, steps, loss=1.0):
    for step in steps:
        log.step(stage, step, {"loss": loss, "kl": None, "ratio": float("nan")})
        sent.step(stage, step, {"loss": loss, "kl": None, "ratio": float("nan")})


def test_steps_before_a_checkpoint_that_a_kill_kept_from_the_tracker_are_sent_at_the_next_start(
    tmp_path,
):
    tracker = Kept()
    log, sent = started(tracker, tmp_path)
    sent.truncate_after("sft", -1)
    do(log, sent, "sft", range(3))
    sent.close()
    killed = Kept()
    killed.points = list(tracker.points)
    killed.answers.clear()
    log, sent = started(killed, tmp_path)
    do(log, sent, "grpo", range(2))  # these wait for the tracker until the run is killed
    log, sent = started(tracker, tmp_path)
    log.truncate_after(STAGES, "grpo", 0)
    sent.truncate_after("grpo", 0)
    do(log, sent, "grpo", range(1, 4), 2.0)
    sent.close()
    killed.answers.set()
    assert [(point.at, point.stage, point.metrics) for point in tracker.points] == [
        *((at, "sft", {"loss": 1.0}) for at in range(3)),
        (3, "grpo", {"loss": 1.0}),
        *((at, "grpo", {"loss": 2.0}) for at in range(4, 7)),
    ]
    assert tracker.points[3].time == read(tmp_path / EVENTS)[3]["time"]
    assert tracker.ends == [False, True]


def test_steps_after_the_checkpoint_that_the_tracker_has_are_not_sent_again(tmp_path):
    tracker = Kept()
    for start in (-1, 0, 1, 2):
        log, sent = started(tracker, tmp_path)
        log.truncate_after(STAGES, "sft", start)
        sent.truncate_after("sft", start)
        do(log, sent, "sft", range(start + 1, 3))
        sent.close()
    assert [point.at for point in tracker.points] == [0, 1, 2]


def test_a_tracker_that_hangs_delays_no_step_and_the_end_by_a_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "SECONDS", 0.1)
    monkeypatch.setattr(sender, "WAITING", 5)
    tracker = Kept()
    tracker.answers.clear()
    log, sent = started(tracker, tmp_path)
    with pytest.raises(TimeoutError, match="5 steps"):
        for _ in range(20):
            do(log, sent, "sft", [1])
    with pytest.raises(TimeoutError):
        sent.close()
    tracker.answers.set()
    other = Kept()
    other.answers.clear()
    log, sent = started(other, tmp_path)
    do(log, sent, "sft", [1])
    with pytest.raises(TimeoutError, match="end of the run"):
        sent.close()
    other.answers.set()


def test_a_tracker_that_fails_warns_once_and_the_record_goes_on(tmp_path, monkeypatch):
    def no_disk(self):
        raise OSError("disk full")

    monkeypatch.setattr("rl.records.trackers.mlflow_tracker.MLflow.open", no_disk)
    events = Events(config(mlflow={}), tmp_path)
    with pytest.warns(UserWarning, match="MLflow failed and is left out.*disk full"):
        for step in range(3):
            events.step("sft", step, {"loss": 1.0})
            time.sleep(0.05)
        events.close()
    assert [row["step"] for row in read(tmp_path / EVENTS)] == [0, 1, 2]


def test_no_request_splits_a_step_or_has_more_metrics_than_mlflow_accepts():
    points = [Point(at, "sft", 0.0, dict.fromkeys(map(str, range(300)), 1.0)) for at in range(8)]
    result = list(requests(points))
    assert [len(each) for each in result] == [3, 3, 2]
    assert [point.at for each in result for point in each] == list(range(8))


def test_names_and_parameters_are_as_mlflow_accepts_them():
    names = {"eval/pass@4": 1.0, "rewards/own.py:score": 2.0, "a//b": 3.0, "../x": 4.0, "x y": 5.0}
    assert by_valid_name(names) == {
        "eval/pass_at_4": 1.0,
        "rewards/own.py_score": 2.0,
        "a/b": 3.0,
        "__/x": 4.0,
        "x y": 5.0,
    }
    tree = {"stages": [{"steps": 2, "betas": [0.9, 0.95]}], "empty": {}, "none": None, "list": []}
    assert dict(flattened(tree)) == {
        "stages.0.steps": 2,
        "stages.0.betas": [0.9, 0.95],
        "list": [],
    }


@pytest.mark.parametrize("uri", ["https://me:word@host", "http://token@host:5000/x"])
def test_an_address_with_a_password_is_refused(uri):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        load(["quickstart"], [f"run.mlflow.uri={uri}"])
    assert "run.mlflow.uri" in str(refused.value)


def test_a_tracker_whose_package_is_missing_is_named_before_the_run_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("mlflow", "trackio"):
        with pytest.raises(ConfigError, match=rf"run\.{name}.*pip install 'duet-rl\[{name}\]'"):
            load(["quickstart"], [f"run.{name}={{}}"])


@pytest.fixture
def mlflow(monkeypatch):
    pytest.importorskip("mlflow", reason="pip install 'duet-rl[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="pip install 'duet-rl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    return mlflow


def history(mlflow, directory, name) -> list[tuple[int, float]]:
    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow/mlflow.db")
    points = client.get_metric_history((directory / "mlflow-id").read_text(), name)
    return [(point.step, point.value) for point in points]


@pytest.mark.slow
def test_mlflow_has_each_step_once_after_resumes(tmp_path, mlflow):
    tracked = config(mlflow={"name": "first"})
    for options, start, loss in ((tracked, -1, 1.0), (config(), 1, 2.0), (tracked, 2, 3.0)):
        events = Events(options, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            events.truncate_after(STAGES, *(("sft", start) if start < 2 else ("grpo", 0)))
            for at in range(start + 1, 3):
                events.step("sft", at, {"loss": loss, "eval/pass@4": 0.5, "kl": float("nan")})
            for at in range(0 if start < 2 else 1, 2 if start < 2 else 4):
                events.step("grpo", at, {"loss": loss, "reward/mean": None})
            events.close()
    # The second start ran without MLflow: its steps up to the checkpoint are there all the same.
    assert history(mlflow, tmp_path, "loss") == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
    ] + [
        (5, 3.0),
        (6, 3.0),
    ]
    assert history(mlflow, tmp_path, "eval/pass_at_4") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'duet'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["stages.1.algorithm.name"] == "grpo"
    assert run.data.params["stages.0.steps"] == "2"


@pytest.mark.slow
def test_a_server_of_mlflow_that_never_answers_does_not_stop_a_run(tmp_path, mlflow, monkeypatch):
    monkeypatch.setattr(sender, "SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        events = Events(
            config(mlflow={"uri": f"http://127.0.0.1:{server.getsockname()[1]}"}), tmp_path
        )
        events.truncate_after(STAGES, "sft", -1)
        events.step("sft", 1, {"loss": 1.0})
        with pytest.warns(UserWarning, match="MLflow failed and is left out.*no answer"):
            events.close()
    assert [row["step"] for row in read(tmp_path / EVENTS)] == [1]


TRACKIO = """
import sys
from pathlib import Path
from rl.records.events import Events
from tests.unit.test_trackers import STAGES, config
folder, start, loss = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
events = Events(config(trackio={"project": "p"}), folder)
events.truncate_after(STAGES, "sft", start)
for step in range(start + 1, 3):
    events.step("sft", step, {"loss": loss, "kl": float("nan")})
if start == 0:
    import time
    time.sleep(6)
    import os
    os._exit(9)  # killed, with all steps sent
events.close()
"""


@pytest.mark.slow
def test_trackio_has_each_step_once_after_resumes(tmp_path):
    pytest.importorskip("trackio", reason="pip install 'duet-rl[trackio]'")
    environment = {key: text for key, text in os.environ.items() if not key.startswith("TRACKIO")}
    for start, loss in ((-1, 1.0), (0, 2.0), (1, 3.0)):
        command = [sys.executable, "-c", TRACKIO, str(tmp_path / "run"), str(start), str(loss)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == (9 if start == 0 else 0), done.stderr
        assert "left out" not in done.stderr
    name = (tmp_path / "run" / "trackio-id").read_text()
    assert name.startswith("run-")
    query = ["get", "metric", "--project", "p", "--run", name, "--metric", "loss", "--json"]
    answer = subprocess.run(
        [sys.executable, "-c", "from trackio.cli import main; main()", *query],
        capture_output=True,
        text=True,
        env=environment | {"TRACKIO_DIR": str(tmp_path / "run" / "trackio")},
        check=True,
    )
    values = [(row["step"], row["value"]) for row in json.loads(answer.stdout)["values"]]
    assert values == [(0, 1.0), (1, 1.0), (2, 1.0)]
