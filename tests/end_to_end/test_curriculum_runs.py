"""Runs whose rows a curriculum chooses: the same bits after kills, and the order of one that
chooses nothing."""

import json

import launch
import pytest

from rl.commands import cli
from rl.records import events, samples
from rl.views.report.read import read_run

pytestmark = pytest.mark.slow
OWN = "tests/end_to_end/own_curricula.py:resting"
PLAIN = ("stages.1.curriculum=" + OWN, *launch.LIGHT, "stages.0.steps=1", "stages.2.steps=0")
DYNAMIC = (*PLAIN, "stages.1.algorithm.dynamic_batches=2", "stages.1.steps=4")
CASES = {"plain": PLAIN, "dynamic": DYNAMIC}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A finished run, and its arguments."""
    directory = tmp_path_factory.mktemp(request.param) / "run"
    assert launch.train(directory, *CASES[request.param]) == 0
    return directory, CASES[request.param]


def test_a_killed_run_goes_on_to_the_same_bits(case, tmp_path):
    uninterrupted, arguments = case
    directory = tmp_path / "run"
    checkpoint = directory / "checkpoints" / "0000000004"  # after two steps of grpo
    assert launch.killed(launch.arguments(directory, *arguments), checkpoint.exists)
    assert launch.train(directory, *arguments) == 0
    launch.assert_same_run(directory, uninterrupted)
    shown = read_run(directory).curricula["grpo"]
    assert shown["title"] == "Rows <at> the start" and shown["bars"][0]["drawn"] > 100


def test_the_state_of_the_curriculum_is_in_the_checkpoint(case):
    directory, _ = case
    states = [
        json.loads(file.read_text())["progress"]["producer"].get("curriculum")
        for file in sorted((directory / "checkpoints").glob("*/host.json"))
    ]
    assert all(state is None or state.keys() == {"drawn", "resting"} for state in states)
    assert any(state and state["drawn"] >= 12 for state in states)


def test_another_curriculum_is_another_run(case, capsys):
    directory, _ = case
    assert cli.train_main([str(directory), "stages.1.curriculum=null"]) == 2
    assert "stages.1.curriculum" in capsys.readouterr().err


def test_a_curriculum_that_leaves_out_nothing_changes_nothing(tmp_path):
    """No reward is below 0, so that no row rests."""
    changes = (*launch.LIGHT, "stages.0.steps=1", "stages.2.steps=0", "stages.1.steps=2")
    curriculum = f"stages.1.curriculum={{name: {OWN}, options: {{least: -1}}}}"
    assert launch.train(tmp_path / "with", *changes, curriculum) == 0
    assert launch.train(tmp_path / "without", *changes) == 0
    launch.assert_same_run(tmp_path / "with", tmp_path / "without")


def test_rows_outside_the_pass_rates_of_a_run_are_not_drawn(case, tmp_path):
    earlier, _ = case
    rewards = {}
    for line in samples.read(earlier):
        rewards.setdefault(line["prompt"], []).append(line["reward"])
    solved = {prompt for prompt, own in rewards.items() if min(own) >= 0.3}
    assert solved
    options = f"{{rollouts: {earlier}, correct_at: 0.3, missing: keep}}"
    changes = ("stages.0.steps=0", "stages.2.steps=0", "stages.1.prompts_per_step=64")
    curriculum = f"stages.1.curriculum={{name: pass_rate, options: {options}}}"
    directory = tmp_path / "run"
    assert launch.train(directory, *launch.LIGHT, *changes, curriculum) == 0
    drawn = {line["prompt"] for line in samples.read(directory)}
    never = {prompt for prompt, own in rewards.items() if max(own) < 0.3}
    assert len(drawn) > 100 and not drawn & (solved | never)
    last = events.read(directory / "events.jsonl")[-1]["metrics"]
    assert last["data/epoch"] > 0
