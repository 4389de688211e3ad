"""`rl plan` on devices of the CPU: the programs of every stage, their memory beside live arrays, and what is refused."""

import json

import jax
import launch
import numpy as np
import pytest

import rl.algorithms
from rl import build, cli, configfile
from rl.trainer import Trainer

MESH = ("mesh.fsdp=2", "mesh.tensor=2")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """(exit code, programs by name, standard output and error) of a plan of the small run."""
    monkeypatch.setenv("DUET_PLAN_CACHE", str(tmp_path / "plans"))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

    def run(topology, *more):
        file = tmp_path / "plan.json"
        file.unlink(missing_ok=True)
        given = launch.arguments(tmp_path / "run", *launch.LIGHT, *more)
        code = cli.main(["plan", *given, "--topology", topology, "--json", str(file)])
        found = json.loads(file.read_text())["programs"] if file.exists() else []
        return code, {each["name"]: each for each in found}, capsys.readouterr()

    return run


def test_every_program_of_every_stage_is_planned(plan, tmp_path):
    code, found, shown = plan("cpu:4", *MESH)
    assert code == 0
    assert {"sft: update", "grpo: update", "grpo: prefill"} <= found.keys() and any("decode" in name for name in found)
    for name, each in found.items():
        assert each["operations"] > 0 and each["moved"] > 0 and each["arguments"] > 0, name
        assert each["peak"] >= each["arguments"], name
        assert name in shown.out
    assert {"all-gather", "all-reduce"} <= found["grpo: update"]["exchanged"].keys()
    assert not (tmp_path / "run").exists(), "a plan leaves no run behind"
    again = plan("cpu:4", *MESH)[1]
    assert again == found, "what is known is not compiled again"


def test_arguments_are_the_bytes_of_the_live_arrays(plan, tmp_path):
    """Of an update on one device: weights, moments and what it reads of the batch; the first two are written in place."""
    found = plan("cpu:1")[1]["sft: update"]
    file, *more = launch.arguments(tmp_path / "run", *launch.LIGHT)
    config = configfile.load([file], more)
    options = config.stages[0]
    graph = build.graph(config, build.on_mesh(config, jax.devices()[:1]))
    trainer = Trainer(graph, options, rl.algorithms.get("sft"))
    state = trainer.start(graph.init(0), seed=0)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    N, T = options.prompts_per_step, config.max_length
    place, _ = trainer.layout(np.ones((N, T), np.int32))
    assert found["aliased"] == held
    read = 3 * 4 * place.shape[0] * place.shape[1] + 4  # tokens, segments and mask, and how many tokens count
    assert found["arguments"] == held + read


@pytest.mark.parametrize(
    ("topology", "more", "code", "text"),
    [
        ("v5p:8by8", (), 2, "--topology v5p:8by8: no such topology; give KIND:AxB"),
        ("v9:2x2", (), 2, "no such topology"),
        ("cpu:0", (), 2, "no such topology"),
        ("cpu:3", ("mesh.fsdp=2",), 5, "needs 2 devices, there are 3"),
        ("cpu:2", ("stages.0.steps=x",), 2, "stages.0.steps"),
    ],
)
def test_what_cannot_be_planned_is_refused(plan, topology, more, code, text):
    found, _, shown = plan(topology, *more)
    assert found == code and text in shown.err
