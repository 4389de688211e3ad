"""Spans of a run in a file that the viewers of traces read, and profiles of the steps that were
asked for."""

import errno
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rewards.workers.threads import Call
from rl.config.run import ProfileOptions
from rl.records.timeline import CHECKPOINTS, FILE, PROFILES, Timeline


def events(directory, kind="X") -> list[dict]:
    result = json.loads((directory / FILE).read_text().rstrip(",\n") + "]")
    return [event for event in result if event["ph"] == kind]


def test_spans_lie_within_their_step_and_a_run_goes_on_after_a_torn_line(tmp_path):
    for first in (1, 3):
        timeline = Timeline(tmp_path, None)
        for step in (first, first + 1):
            with timeline.step("grpo", step), timeline.span("sampling") as inner:
                pass
            assert inner.seconds > 0
        timeline.close()
        with (tmp_path / FILE).open("a") as file:
            file.write('{"name": "st')
    Timeline(tmp_path, None).close()
    result = events(tmp_path)
    assert [event["name"] for event in result] == ["sampling", "step"] * 4
    assert [event["args"] for event in result[1::2]] == [
        {"stage": "grpo", "step": step} for step in (1, 2, 3, 4)
    ]
    for inner, step in zip(result[::2], result[1::2], strict=True):
        assert step["ts"] <= inner["ts"] and inner["dur"] <= step["dur"]


def test_what_happens_next_to_the_run_has_rows_of_its_own(tmp_path):
    timeline = Timeline(tmp_path, None)
    with timeline.span("sampling"), timeline.span("writing a checkpoint", CHECKPOINTS):
        timeline.calls([Call("math", 4, 1, 12.5, 0.25), Call("length", 2, 1, 13.0, 0.5)])
    timeline.close()
    rows = {event["tid"]: event["args"]["name"] for event in events(tmp_path, "M")}
    result = {event["name"]: (rows[event["tid"]], event["args"]) for event in events(tmp_path)}
    assert result["math"] == ("rewards 1", {"completions": 4}) and result["length"] == (
        "rewards 1",
        {"completions": 2},
    )
    assert result["writing a checkpoint"][0] == "checkpoints" and result["sampling"][0] == "run"
    assert [(e["ts"], e["dur"]) for e in events(tmp_path)[:2]] == [(12.5e6, 0.25e6), (13e6, 0.5e6)]
    assert len(events(tmp_path, "M")) == 3


def test_a_step_that_fails_is_there_and_its_profile_is_written(tmp_path):
    timeline = Timeline(tmp_path, ProfileOptions(steps=[2, 3]))
    recorded = []
    for step in (1, 2, 3, 4):
        with pytest.raises(KeyError), timeline.step("sft", step):
            jax.block_until_ready(jax.jit(lambda a: a @ a)(jnp.ones((8, 8))))
            raise KeyError(step)
        recorded.append(len(list((tmp_path / PROFILES).rglob("*.xplane.pb"))))
    timeline.close()
    assert recorded == [0, 0, 1, 1] and len(events(tmp_path)) == 4


@pytest.mark.parametrize("steps", [[0, 2], [3, 2]])
def test_steps_that_cannot_be_recorded_are_refused(steps):
    with pytest.raises(ValueError, match="no first and last step"):
        ProfileOptions(steps=steps)


def test_a_full_disk_costs_lines_of_the_file_and_nothing_else(tmp_path, monkeypatch):
    timeline, write, room = Timeline(tmp_path, None), os.write, [200]

    def limited(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(file, bytes(data[: room[0]]))
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    for _ in range(4):
        timeline.past("sampling", 1.0, 0.5)
    assert (
        len(events(tmp_path)) == 1
    )  # after a line that names its row; what was written of the next is gone
    room[0] = 10**6
    timeline.past("export", 2.0, 0.5)
    room[0] = 0
    timeline.close()
    assert [event["name"] for event in events(tmp_path)] == ["sampling", "export"]
    Timeline(tmp_path, None).close()
    with Path(tmp_path / FILE).open("w"):
        pass
    nowhere = Timeline(tmp_path, None)  # there is no room for its first line
    nowhere.past("sampling", 1.0, 0.5)
    nowhere.close()


def test_a_profile_that_finds_no_room_is_told_and_stops_no_run(tmp_path, monkeypatch, caplog):
    def full():
        raise RuntimeError("INTERNAL: could not write: No space left on device")

    timeline = Timeline(tmp_path, ProfileOptions(steps=[1, 1]))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with timeline.step("sft", 1):
        pass
    timeline.close()
    assert "no profile is recorded" in caplog.text
