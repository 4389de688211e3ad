"""A run of preferred pairs: DPO, a reward model, and GRPO for what that model says."""

import json
import shutil

import jax
import launch
import numpy as np
import pytest
from oracles import configuration, random_model

import policy
from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from rl.commands import cli
from rl.errors import DataError
from rl.records import events
from rl.run import build
from rl.run.load import load
from rl.run.prepare import prepare
from rl.stages import create
from rl.stages.scorers import abstract_scorers
from rl.training.reward_model import RewardModelScorer
from rollout.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("preferences")
RUN = """
platform: cpu
model: {source: MODEL, remat: none, scan: false}
tokenizer: {source: characters, alphabet: "0123456789+-*= "}
max_length: 24
data: {task: arithmetic, options: {max_operand: 9}}
rewards: {functions: [exact_answer], workers: 1}
evaluation: {data: {task: arithmetic, options: {max_operand: 9}}, problems: 4}
generator: {slots: 4, tokens_per_dispatch: 4}
stages:
  - {algorithm: dpo, steps: 2, prompts_per_step: 4, data: PAIRS, sampling: {max_new_tokens: 4}}
  - {algorithm: reward_model, steps: 3, prompts_per_step: 4, data: PAIRS, optimizer: {learning_rate: 1e-2}}
  - algorithm: grpo
    steps: 1
    prompts_per_step: 2
    samples_per_prompt: 4
    sampling: {max_new_tokens: 4}
    rewards: {functions: [{name: reward_model, weight: 2, options: {source: reward_model}}, length], workers: 1}
"""


def written(folder):
    """(configuration, folder of the model)."""
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    policy.save(random_model(families.read(configuration("Llama", **sizes))), folder / "model")
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1), "margin": 0.1}
        for a, b in [(1, 2), (3, 9), (5, 5)]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    text = RUN.replace("MODEL", str(folder / "model")).replace("PAIRS", str(folder / "pairs.jsonl"))
    (folder / "run.yml").write_text(text)
    return folder / "run.yml", folder / "model"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    file, _ = written(folder)
    assert (
        cli.train_main(
            [
                str(file),
                f"run.dir={folder / 'run'}",
                "run.checkpoint_every=0",
                "run.keep_checkpoints=9",
            ]
        )
        == 0
    )
    return folder


def test_a_stage_trains_a_reward_model_that_transformers_reads_and_the_next_one_asks_it(finished):
    import torch
    from transformers import AutoModelForSequenceClassification

    run = finished / "run"
    rows = {
        (row["stage"], row["step"]): row["metrics"] for row in events.read(run / "events.jsonl")
    }
    assert [key for key in rows if key[0] == "reward_model"] == [
        ("reward_model", step) for step in (1, 2, 3)
    ]
    assert {"rewards/margins", "logps/chosen", "nll", "entropy"} <= rows["dpo", 2].keys() and rows[
        "dpo", 1
    ]["rewards/margins"] == 0
    assert rows["dpo", 2]["rewards/margins"] != 0  # the reference has stayed behind
    assert rows["reward_model", 3]["loss"] < rows["reward_model", 1]["loss"]
    assert (
        "eval/greedy_accuracy" in rows["grpo", 0]
        and rows["grpo", 1]["rewards/reward_model/std"] > 0
    )
    assert rows["grpo", 1]["time/reward_models"] > 0
    directory = run / "reward_models" / "reward_model"
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    tokenizer = load_tokenizer(directory)
    samples = launch.trained(run)
    assert len(samples) == 8
    for sample in samples:
        ids = tokenizer.encode(sample["prompt"]) + sample["tokens"]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.item()
        np.testing.assert_allclose(sample["rewards"]["reward_model"], expected, atol=1e-5)
        np.testing.assert_allclose(
            sample["reward"], 2 * expected + sample["rewards"]["length"], atol=1e-5
        )


def test_a_reward_model_is_planned_as_the_stage_leaves_it(finished):
    file, run = finished / "run.yml", finished / "run"
    config = load([file], [f"run.dir={run}"])
    graph = build.graph(config, build.on_mesh(config, jax.devices()[:1]))
    (planned,) = abstract_scorers(config, config.stages[2].rewards, graph).values()
    read = RewardModelScorer.read(
        run / "reward_models" / "reward_model", Runtime(), graph.layout, 24
    )
    assert (
        planned.graph.config.layers == read.graph.config.layers
        and planned.abstract == read.abstract
    )
    assert abstract_scorers(config, create(config)[0].rewards, graph) == {}


def test_a_run_that_is_cut_off_in_it_goes_on_to_the_same_bits(finished, tmp_path):
    """Between the last checkpoint of the stage and the file of its reward model: that, and all that
    follows, are made again.
    """
    run = tmp_path / "again"
    shutil.copytree(finished / "run", run)
    shutil.rmtree(run / "export")
    kept = sorted((run / "checkpoints").iterdir())
    for made in (*kept[2:], run / "reward_models"):
        shutil.rmtree(made)
    assert cli.train_main([str(finished / "run.yml"), f"run.dir={run}"]) == 0
    launch.assert_same_run(finished / "run", run)
    same = "reward_models/reward_model/model.safetensors"
    assert (run / same).read_bytes() == (finished / "run" / same).read_bytes()


def test_a_pair_is_read_up_to_the_last_token_that_a_completion_would_have(tmp_path):
    """Templates write white space behind the end of a turn; no completion has it, and no score is
    read there."""
    turns = "{% for m in messages %}{{ m.role[0] + m.content + '<eos>\\n' }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}a{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))
    ]
    answers = [[{"role": "assistant", "content": text}] for text in ("four", "5")]
    rows = [
        {"chosen": [*talk, *answers[0]], "rejected": [*talk, *answers[1]]},
        {"prompt": "6", "chosen": "7", "rejected": "89"},
    ]
    file, _ = written(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = (
        f"tokenizer={{source: bytes, alphabet: null, chat_template: {tmp_path / 'template.jinja'}}}"
    )
    dpo = f"stages=[{{algorithm: dpo, steps: 1, data: {tmp_path / 'pairs.jsonl'}}}]"
    model = "model={source: tiny-deepseek, overrides: {vocab_size: 264}}"
    changes = (model, tokenizer, dpo, "evaluation=null", f"run.dir={tmp_path / 'run'}")
    read = prepare(load([file], [*changes, "max_length=32"]))
    text = read.tokenizer.decode
    for pair, expected in zip(
        read.stages[0].rows.own, [("four<eos>", "5<eos>"), ("7<eos>", "89<eos>")], strict=True
    ):
        for (ids, mask, _), answer in zip((pair.chosen, pair.rejected), expected, strict=True):
            assert (
                text([i for i, m in zip(ids, mask, strict=True) if m]) == answer and mask[-1] == 1
            )
    assert text(read.stages[0].rows.own[0].chosen[0]) == "u1<eos>\na2<eos>\nu3<eos>\nafour<eos>"
    with pytest.raises(
        DataError, match=r"than the 16 tokens that fit: first .*pairs.jsonl:1 with 18 tokens"
    ):
        prepare(load([file], [*changes, "max_length=16"]))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "reward_model needs `source`"),
        ("nowhere", "no stage of that name trains a reward model (reward_model)"),
        ("MODEL", "a model of 2 labels; a reward model has one"),
        ("grpo", "no directory grpo with a config.json"),
        ("RUN", "was trained with another tokenizer"),
    ],
)
def test_a_reward_model_that_cannot_be_asked_is_refused(source, said, finished, tmp_path, capsys):
    place = {
        "MODEL": finished / "model",
        "RUN": finished / "run" / "reward_models" / "reward_model",
    }.get(source, source)
    functions = [{"name": "reward_model", "options": {"source": str(place)} if place else {}}]
    changes = [f"run.dir={tmp_path / 'run'}", f"stages.2.rewards.functions={json.dumps(functions)}"]
    if source == "RUN":
        changes.append("tokenizer={source: characters, alphabet: '0123456789+-*/ '}")
    assert cli.train_main([str(finished / "run.yml"), *changes]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_that_ends_with_a_reward_model_exports_it(finished, tmp_path):
    changes = [
        "evaluation=null",
        "stages=[{algorithm: reward_model, steps: 0, prompts_per_step: 3, data: PAIRS}]",
    ]
    changes[1] = changes[1].replace("PAIRS", str(finished / "pairs.jsonl"))
    assert cli.train_main([str(finished / "run.yml"), f"run.dir={tmp_path / 'run'}", *changes]) == 0
    scorer = RewardModelScorer.read(
        tmp_path / "run" / "export", Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]), 16
    )
    assert np.isfinite(scorer([[9, 10, 2], [9]])).all()


@pytest.mark.slow
def test_a_run_that_stops_in_the_stage_of_a_reward_model_exports_it_as_it_is_then(
    finished, tmp_path, monkeypatch
):
    from rl.run.unfinished import stop

    run = tmp_path / "run"
    monkeypatch.setattr(stop, "is_asked", lambda run: '"reward_model","step":2' in events_text(run))
    assert cli.train_main([str(finished / "run.yml"), f"run.dir={run}"]) == 0
    assert stop.stopped(run) == ("reward_model", 2) and not (run / "reward_models").exists()
    assert np.isfinite(
        RewardModelScorer.read(run / "export", Runtime(), one_device(), 16)([[9, 10, 2]])
    ).all()
    monkeypatch.undo()
    assert cli.train_main([str(run)]) == 0
    for name in ("reward_models/reward_model", "export"):
        bits = [
            (folder / name / "model.safetensors").read_bytes() for folder in (run, finished / "run")
        ]
        assert bits[0] == bits[1]
    assert (run / "export-reward_model-2").is_dir()


def events_text(run) -> str:
    return (run / "events.jsonl").read_text()


def one_device():
    return layout({"fsdp": 1}, devices=jax.devices()[:1])
