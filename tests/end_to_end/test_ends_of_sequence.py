"""Ends of sequence: every verb and the export of a run stop where transformers stops with the ends
of the model."""

import io
import json

import pytest
import yaml
from oracles import configuration, random_model

import policy
from policy import families
from policy.huggingface import generation_config
from rl.commands import cli
from rl.records import samples
from rollout.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow  # test_generate_verbs.py has the plain case of `rl generate`

ENDS, OTHERS = [2, *range(8, 320, 4)], [2, *range(9, 320, 4)]
# What config.json and generation_config.json say, and where a completion ends.
CASES = {
    "no generation_config.json": (ENDS, None, ENDS),
    "one without ends": (ENDS, {"do_sample": True, "temperature": 0.6, "top_k": 20}, ENDS),
    "one with other ends": (ENDS, {"eos_token_id": OTHERS, "pad_token_id": 0}, OTHERS),
}
LONGEST, PROMPTS = 12, ("one", "and two", "or three")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 320, "num_hidden_layers": 1, "initializer_range": 0.3}
    policy.save(random_model(families.read(configuration("Llama", **sizes))), directory)
    load_tokenizer("bytes").save_pretrained(directory)
    return directory


def completed_by_transformers(directory, prompts, **options):
    """The tokens that transformers decodes greedily after each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model, made = AutoModelForCausalLM.from_pretrained(directory), []
    for ids in prompts:
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False, **options
        )
        made.append(tokens[0, len(ids) :].tolist())
    return made


def rl(*arguments):
    return cli.main([*map(str, arguments), "--platform", "cpu"])


def model_with(case, weights, tmp_path):
    """A model with the ends of a case, and what transformers must be told of them: 5.24 runs on
    where generation_config.json is there and names no ends.
    """
    ends, generation, _ = CASES[case]
    source = tmp_path / "model"
    source.mkdir()
    for file in weights.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((weights / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    if generation is not None:
        (source / generation_config.FILE).write_text(json.dumps(generation))
    return source, {"eos_token_id": ends} if generation and "eos_token_id" not in generation else {}


@pytest.mark.parametrize("case", CASES)
def test_completions_end_where_transformers_ends_them(case, weights, tmp_path, capsys, monkeypatch):
    expected = CASES[case][-1]
    source, told = model_with(case, weights, tmp_path)
    tokenizer = load_tokenizer(source)
    plain = [tokenizer.encode(text) for text in PROMPTS]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    theirs, answers = (
        completed_by_transformers(source, prompts, **told) for prompts in (plain, chats)
    )
    assert all(made[-1] in expected or len(made) == LONGEST for made in theirs)
    assert any(len(made) < LONGEST for made in theirs) and len({len(made) for made in theirs}) > 1

    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    greedy = ("--max-new-tokens", LONGEST, "--temperature", 0)
    assert rl("generate", source, "--prompts", tmp_path / "prompts.txt", *greedy) == 0
    assert [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()] == theirs

    monkeypatch.setattr("sys.stdin", io.StringIO("\n/reset\n".join(PROMPTS)))
    assert rl("chat", source, *greedy, "--max-length", 64) == 0
    assert capsys.readouterr().out == "".join(
        tokenizer.decode(made, skip_special_tokens=True) + "\n" for made in answers
    )


@pytest.mark.parametrize("case", CASES)
def test_evaluations_of_a_run_and_its_export_end_there_too(case, weights, tmp_path, capsys):
    expected = CASES[case][-1]
    source, told = model_with(case, weights, tmp_path)
    plain = [load_tokenizer(source).encode(text) for text in PROMPTS]
    theirs = completed_by_transformers(source, plain, **told)
    rows = [{"prompt": text, "answer": "0"} for text in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "run": {"dir": str(tmp_path / "run")},
        "platform": "cpu",
        "model": str(source),
        "max_length": 32,
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "rewards": {"functions": ["tests/end_to_end/own_rewards.py:digits"], "workers": 1},
        "evaluation": {"data": {"path": str(tmp_path / "rows.jsonl")}, "samples": 0},
        "stages": [
            {
                "algorithm": "grpo",
                "steps": 1,
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "optimizer": {"learning_rate": 1e-12},
                "sampling": {"max_new_tokens": LONGEST},
            }
        ],
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(run))
    assert cli.train_main([str(tmp_path / "run.yml")]) == 0, capsys.readouterr().err
    evaluated = {
        row["prompt"]: row["tokens"] for row in samples.read(tmp_path / "run") if row.get("eval")
    }
    assert [evaluated[text] for text in PROMPTS] == theirs
    export = tmp_path / "run" / "export"
    assert json.loads((export / generation_config.FILE).read_text())["eos_token_id"] == sorted(
        expected
    )
    assert completed_by_transformers(export, plain) == theirs
