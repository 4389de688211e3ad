"""A run that is only in a remote folder, looked at from there: `rl doctor`, `rl report`, `rl samples`
and `rl explain` with its URL."""

import json
import shutil
import time
from pathlib import Path

import pytest
import remote_runs

from rl.commands import cli
from rl.remote.lock import LOCK, LeaseTimes
from rl.run.mirror import health
from rl.run.mirror.mirror import RunMirror
from rl.run.mirror.viewed import local_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a run in `run`, and its copy in `remote`."""
    monkeypatch.setenv("DUET_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    remote_runs.start(run)
    (run / "config.yml").write_text(f"run:\n  remote: file://{tmp_path}/remote\n")
    send(tmp_path, 1)
    send(tmp_path, 2)
    return tmp_path


def send(place, *numbers, name="run"):
    at_once = LeaseTimes(settle_s=0.0)
    url = f"file://{place}/remote"
    with RunMirror(url, place / name, 2, remote_runs.needed, times=at_once):
        for number in numbers:
            remote_runs.step(place / name, number)
            remote_runs.checkpoint(place / name, number)


def said(place, run="run") -> dict[str, str]:
    return {each.text: each.level for each in health.faults(f"file://{place}/remote", place / run)}


def test_a_remote_folder_that_is_as_far_as_the_run_is_said_to_be(place, capsys):
    assert set(said(place).values()) == {"note"}
    assert any("newest checkpoint is 2, as that of" in text for text in said(place))
    assert cli.main(["doctor", str(place / "run")]) == 0
    printed = capsys.readouterr().out
    assert "ok   remote folder" in printed and "no run holds its lock" in printed
    assert cli.main(["doctor", f"file://{place}/remote", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out)
    assert any("a start there fetches it" in each["number"] for each in faults)
    assert not (place / "remote" / LOCK).exists()


def test_differences_and_damage_are_named(place):
    remote_runs.checkpoint(place / "run", 3)
    assert said(place)[f"it has checkpoint 2, and {place}/run has checkpoint 3"] == "warn"
    shutil.rmtree(place / "run" / "checkpoints")
    assert any("a start there fetches it" in text for text in said(place))
    host = place / "remote/checkpoints/0000000002/host.json"
    host.write_text(host.read_text() + " ")
    texts = said(place)
    assert [level for text, level in texts.items() if "host.json: " in text] == ["refuse"]
    assert any("newest checkpoint is 1" in text for text in texts)
    (place / "remote/checkpoints/0000000002/manifest.json").unlink()
    assert any("was cut off" in text for text in said(place))
    remote_runs.start(place / "other", name="other")
    assert any("holds another run" in text for text in said(place, "other"))
    shutil.rmtree(place / "remote")
    assert any("nothing has been sent" in text for text in said(place))


def test_the_holder_of_the_lock_is_named(place):
    held = {
        "owner": "x",
        "host": "elsewhere",
        "machine": "",
        "process": 7,
        "folder": "/runs/a",
        "expires": time.time() + 60,
    }
    lock = place / "remote" / LOCK
    lock.write_text(json.dumps(held))
    [text] = [each for each in said(place) if "in use by" in each]
    assert "/runs/a on elsewhere" in text and said(place)[text] == "note"
    lock.write_text(json.dumps(held | {"expires": time.time() - 3600}))
    [text] = [each for each in said(place) if "was in use by" in each]
    assert "expired" in text and said(place)[text] == "warn"
    lock.write_text("{")
    assert any("names no run" in each for each in said(place))


def test_commands_that_look_at_a_run_take_its_url(place, capsys):
    url = f"file://{place}/remote"
    copy = local_run(url)
    assert copy == local_run(f"{url}/") and not (place / "remote" / LOCK).exists()
    send(place, 3)
    assert cli.main(["explain", url]) == 0
    assert cli.main(["report", url, "-o", str(place / "report.html")]) == 0
    assert (place / "report.html").exists()
    steps = (place / "run/events.jsonl").read_bytes()
    assert (place / "cache/runs").is_dir() and steps == Path(copy, "events.jsonl").read_bytes()
    assert local_run(str(place / "run")) == str(place / "run")
    capsys.readouterr()
    assert cli.main(["report", f"file://{place}/nothing"]) == 2
    assert "no run there" in capsys.readouterr().err

    shutil.rmtree(place / "remote")  # another run takes its place
    remote_runs.start(place / "second", name="second")
    send(place, 1, name="second")
    assert local_run(url) == copy
    assert (place / "second/run.json").read_bytes() == Path(copy, "run.json").read_bytes()
