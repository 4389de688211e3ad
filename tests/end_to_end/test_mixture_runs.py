"""Runs of several datasets: metrics and samples by source, and the bits of a run that went on."""

import json

import launch
import numpy as np
import pytest

from rl.commands import cli
from rl.records import events, samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A configuration: two datasets in sft and grpo, held out and in the evaluation as well."""
    folder = tmp_path_factory.mktemp("mixed")
    lists = {}
    for name, operator, count in (("sums", "+", 9), ("products", "*", 20)):
        rows = [{"prompt": f"{n}{operator}2=", "completion": f"{n}"} for n in range(count)]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lists[name] = str(file)
    data = [{"path": lists["sums"], "weight": 3}, {"path": lists["products"], "weight": 1}]
    held_out = {"data": [lists["sums"], lists["products"]]}
    sections = {
        "data": data,
        "evaluation": {"data": [lists["sums"], {"path": lists["products"]}], "problems": 4},
        # With a capacity, tokens that a router drops depend on the rows of a block.
        "stages": {"0": {"held_out": held_out, "router": {"capacity_factor": None}}},
    }
    file = folder / "mixed.yml"
    file.write_text(json.dumps(sections))
    return file


def train(file, directory, *more):
    return cli.train_main([str(launch.SMALL), str(file), f"run.dir={directory}", *more])


@pytest.fixture(scope="module")
def run(mixed, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "run"
    assert train(mixed, directory) == 0
    return directory


def of(run, stage):
    return [row["metrics"] for row in events.read(run / "events.jsonl") if row["stage"] == stage]


def test_metrics_of_sources_add_up_to_those_of_all_rows(run):
    for metrics in of(run, "sft")[1:]:
        assert metrics["source/sums/rows"] == 6 and metrics["source/products/rows"] == 2
        low, high = sorted(metrics[f"source/{name}/nll"] for name in ("sums", "products"))
        assert low <= metrics["nll"] <= high
    assert metrics["source/sums/epoch"] == 18 / 9 and metrics["source/products/epoch"] == 6 / 20
    assert metrics["data/epoch"] == 24 / 29
    first = of(run, "sft")[0]
    # Answers of one digit and of two, with their ends: tokens of each dataset.
    tokens = {"sums": 9 * 2, "products": 10 * 2 + 10 * 3}
    losses = [first[f"held_out/{name}/nll"] * count for name, count in tokens.items()]
    assert sum(losses) / sum(tokens.values()) == pytest.approx(first["held_out/nll"], rel=1e-5)
    assert first["eval/problems"] == 8 and first["eval/sums/problems"] == 4
    for metrics in of(run, "grpo")[1:]:
        assert metrics["source/sums/rows"] == 3 and metrics["source/products/rows"] == 1
        parts = 3 * metrics["source/sums/reward_mean"] + metrics["source/products/reward_mean"]
        assert parts / 4 == pytest.approx(metrics["reward/mean"])
    for metrics in of(run, "grpo"):
        if "eval/pass@1" in metrics:
            for name in ("greedy_accuracy", "reward_mean", "pass@1"):
                parts = [metrics[f"eval/{source}/{name}"] for source in ("sums", "products")]
                assert np.mean(parts) == pytest.approx(metrics[f"eval/{name}"])


def test_samples_say_where_their_prompt_came_from(run):
    lines = list(samples.read(run))
    assert len(lines) > 50
    for line in lines:
        assert line["source"] == ("sums" if "+" in line["prompt"] else "products")
        assert line["columns"]["source"] == line["source"]


def test_a_run_that_stopped_goes_on_to_the_same_bits(run, mixed, tmp_path):
    directory = tmp_path / "run"
    arguments = [str(launch.SMALL), str(mixed), f"run.dir={directory}"]
    checkpoint = directory / "checkpoints" / "0000000006"
    assert launch.killed(arguments, checkpoint.exists)
    assert train(mixed, directory) == 0
    launch.assert_same_run(directory, run)


def test_other_weights_are_another_run(run, mixed, capsys):
    assert cli.train_main([str(run), "data.0.weight=2"]) == 2
    assert "data" in capsys.readouterr().err
