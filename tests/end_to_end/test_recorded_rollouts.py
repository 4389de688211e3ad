"""A run on the recorded samples of another one (`stages.N.rollouts`)."""

import json

import launch
import numpy as np
import pytest
from test_asking_algorithms import DENSE, stage

from rl.commands import cli
from rl.records import events
from rl.records.samples import TOKEN


def given(**more):
    one = stage("dapo", steps=4) | {"updates_per_step": 2, "sampling": {"max_new_tokens": 6}}
    return (
        *DENSE,
        f"stages={json.dumps([one | more])}",
        "rewards={functions: [tests/end_to_end/own_rewards.py:seldom], workers: 1}",
        "data.options.problems=10000",
    )


@pytest.mark.slow
def test_recorded_samples_make_the_same_updates(tmp_path, capsys):
    """With dynamic sampling and two updates a step: the groups of a step are those that it trained
    on, some of them drawn by older weights."""
    first, again = tmp_path / "first", tmp_path / "again"
    assert launch.train(first, *given()) == 0
    assert launch.train(again, *given(rollouts=str(first))) == 0
    for name in ("export/model.safetensors", "samples.jsonl"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name
    one, other = (np.fromfile(folder / "tokens.bin", TOKEN) for folder in (first, again))
    assert np.isnan(other["gap"]).all() and not np.isnan(one["gap"]).all()
    one["gap"] = np.nan
    assert one.tobytes() == other.tobytes()
    rows = [row["metrics"] for row in events.read(again / "events.jsonl")]
    assert any(row["optim/grad_norm"] > 0 for row in rows)
    before = [row["metrics"] for row in events.read(first / "events.jsonl")]
    assert any(row.get("async/staleness_max") for row in before)
    assert all("rewards/seldom/mean" in row for row in rows)
    absent = ("generator/useful_rows", "dynamic/batches", "async/staleness_max", "reward/faults")
    assert not any(name in row for row in rows for name in absent)
    for key in ("loss", "reward/mean", "optim/grad_norm"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in before], key
    # What it refuses, it refuses for --check too.
    other = (*given(rollouts=str(first)), "tokenizer.alphabet='=*-+9876543210 '")
    for check in ((), ("--check",)):
        arguments = [*launch.arguments(tmp_path / "other", *other), *check]
        assert cli.train_main(arguments) == 3
        assert "tokens are those of another tokenizer" in capsys.readouterr().err
    assert cli.main(["report", str(again)]) == 0
