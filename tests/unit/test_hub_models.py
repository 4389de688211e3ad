"""Models of the Hugging Face hub, in a cache folder with its layout: names, files, revisions, and what offline says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

import policy
from policy.huggingface import sources
from rl.commands.cli import train_main
from rl.data import models
from rl.errors import ConfigError, ModelError
from rl.run import build
from rl.run.load import load
from rl.run.prepare import prepare
from rollout.text.tokenizer import load_tokenizer

OLD, NEW = "1" * 40, "2" * 40
SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
RUN = """
data: {task: arithmetic}
max_length: 64
platform: cpu
stages: [{algorithm: sft, steps: 1, prompts_per_step: 4, sampling: {max_new_tokens: 8}}]
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a working directory with a run."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "run.yml").write_text(RUN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path / "work")
    models._snapshot.cache_clear()
    return tmp_path / "hub"


def add(cache: Path, commit: str = NEW, ref: str = "main", seed: int = 1, weights: bool = True) -> Path:
    """Adds a commit of org/name to the cache, and returns its snapshot."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    policy.save(policy.create(sources.preset("qwen3-0.6b", SIZES | HEADS), seed=seed), snapshot)
    load_tokenizer("bytes").save_pretrained(snapshot)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    if not weights:
        (snapshot / "model.safetensors").unlink()
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize("name", ["org/name", "hf://org/name", "hf://org/name@v1.0", f"org/name@{OLD}", "hf://gpt3"])
def test_names_of_the_hub(name, cache):
    assert models.is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    ["qwen3-0.6b", "qwen3-0.6", "a/b/c", "/a/b", "../a", "org/..", "hf://", "hf://a/b/c", "gs://a/b", "a/b@../x"],
)
def test_other_names(name, cache):
    assert not models.is_hub_name(name) and models.directory(name) is None


def test_a_preset_and_a_directory_come_first(cache):
    add(cache)
    Path("org").mkdir()
    assert not models.is_hub_name("org/name") and models.is_hub_name("hf://org/name")  # a misspelt path
    Path("org/name").mkdir()
    assert models.directory("org/name") == Path("org/name")
    assert models.directory("qwen3-0.6b") is None


def test_a_run_reads_model_tokenizer_and_stops_from_the_cache(cache):
    old, new = add(cache, OLD, "v1", seed=5), add(cache)
    for name, snapshot in (("org/name", new), ("hf://org/name@v1", old), (f"hf://org/name@{OLD}", old)):
        config = load(["run.yml"], [f"model={name}"])
        assert config.model.source == name and models.directory(name) == snapshot
        prepared = prepare(config)
        assert prepared.stop_ids == (2, 7) and prepared.tokenizer.name_or_path == str(snapshot)
        model = build.model(config, prepared, with_weights=True)
        expected = policy.load(snapshot)
        assert all((model.params[path] == array).all() for path, array in expected.params.items())
        prepared.close()


def test_overrides_and_a_missing_tokenizer_are_refused_as_for_a_directory(cache):
    snapshot = add(cache)
    with pytest.raises(ConfigError, match="org/name holds weights"):
        load(["run.yml"], ["model={source: org/name, overrides: {hidden_size: 8}}"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load(["run.yml"], ["model=org/name"])


def test_offline_and_not_in_the_cache_is_exit_code_4(cache):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-m", "rl.commands.cli", "run.yml"]
    for name, advice in (("Org/Name", "hf download Org/Name`"), ("hf://Org/Name@v1", "Org/Name --revision v1`")):
        ended = subprocess.run([*command, f"model={name}"], env=environment, capture_output=True, text=True)
        assert ended.returncode == 4, ended.stderr
        for word in ("error in the model", name, "offline", "HF_HUB_OFFLINE", str(cache), advice, "local directory"):
            assert word in ended.stderr
        assert "Traceback" not in ended.stderr
    assert [path.name for path in Path().iterdir()] == ["run.yml"]


def test_problems_of_the_configuration_come_before_the_model(cache, capsys):
    assert train_main(["--check", "run.yml", "model=org/name", "stages.0.step=3"]) == 2
    assert "stages.0.step" in capsys.readouterr().err
    assert train_main(["--check", "run.yml", "model=org/name"]) == 4


def test_a_model_without_safetensors_or_configuration_never_starts_from_random_weights(cache):
    snapshot = add(cache, weights=False)
    (snapshot / "pytorch_model.bin").write_bytes(b"pickle")
    config = load(["run.yml"], ["model=org/name"])
    prepared = prepare(config)
    with pytest.raises(ModelError, match="holds no safetensors"):
        build.model(config, prepared, with_weights=True)
    prepared.close()
    (snapshot / "config.json").unlink()
    models._snapshot.cache_clear()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(["run.yml"], ["model=org/name"])


def test_only_safetensors_and_configurations_are_downloaded_and_weights_at_last(cache, monkeypatch):
    snapshot, calls = add(cache), []

    def download(name, **how):
        calls.append((name, how["revision"], how["allow_patterns"], how["ignore_patterns"]))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    listing = [
        *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md", "modeling.py"),
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "consolidated.safetensors"),
        *(
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "tf_model.h5",
            "onnx/model.safetensors",
            "x.pkl",
            "y.pt",
        ),
    ]
    assert models.directory("hf://org/name@v1") == models.directory("hf://org/name@v1", weights=True) == snapshot
    (name, revision, *first), (_, commit, *second) = calls
    assert (name, revision, commit) == ("org/name", "v1", NEW)  # weights of the commit that the configuration is of
    taken = [list(filter_repo_objects(listing, allow_patterns=a, ignore_patterns=i)) for a, i in (first, second)]
    assert taken[0] == ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
    assert taken[1] == [*taken[0], "model-00001-of-00002.safetensors", "model.safetensors.index.json"]


def test_an_error_of_the_hub_is_named(cache, monkeypatch):
    def download(*_, **how):
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"org/name: .* LocalEntryNotFoundError: no connection.*hf auth login"):
        models.directory("org/name")
