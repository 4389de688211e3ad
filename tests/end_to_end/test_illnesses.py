"""Runs that are made ill here and now, and what `rl explain` says of them."""

import json
import sys

import launch
import pytest

from rl.records import events
from rl.views.explain import findings

sys.path.insert(0, str(launch.ROOT / "tests" / "illnesses"))

import make  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "illness"),
    [
        ("learning_rate_sft", "learning rate too high"),
        ("mask", "wrong mask"),
        ("healthy_sft", None),
    ],
)
def test_an_illness_is_named(tmp_path, name, illness):
    named = [each.name for each in findings(make.make(name, tmp_path)) if each.level != "note"]
    assert named[:1] == ([illness] if illness else [])


@pytest.mark.slow
def test_every_illness_but_one_at_most_is_named(tmp_path):
    ill = {
        "equal_rewards": "equal rewards",
        "faults": "reward faults",
        "truncated": "clipped completions",
        "template_between": "wrong template",
        "stale": "stale groups",
        "filtered": "groups dropped",
        "held": "KL penalty too high",
    }
    missed = [
        name
        for name, each in ill.items()
        if each not in {f.name for f in findings(make.make(name, tmp_path))}
    ]
    assert not missed


@pytest.mark.slow
def test_a_probe_changes_no_number_and_its_result_is_kept(uninterrupted, tmp_path):
    assert launch.train(tmp_path / "run", "run.probe=4") == 0
    launch.assert_same_run(uninterrupted, tmp_path / "run")
    probed = json.loads((tmp_path / "run" / "probe.json").read_text())
    assert probed["stage"] == "grpo" and probed["completions"] == 16 and probed["problems"] == []


@pytest.mark.slow
def test_a_probe_that_cannot_learn_ends_the_run(tmp_path, capsys):
    constant = "rewards={functions: [tests/illnesses/own_rewards.py:constant], workers: 1}"
    arguments = (constant, "stages.1.rewards=null", "run.probe=4", "evaluation=null")
    assert launch.train(tmp_path / "run", *arguments) == 3
    said = capsys.readouterr()
    assert "all 16 rewards are 0.5" in said.err and "run.probe=0 leaves it out" in said.err
    assert not [
        row for row in events.read(tmp_path / "run" / "events.jsonl") if row["stage"] == "grpo"
    ]
