"""Models of the Hugging Face hub, in a cache folder with its layout: names, files, revisions, and
what offline says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

import policy
from policy.config import Runtime
from policy.huggingface import classification, sources
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.commands import cli
from rl.commands.cli import train_main
from rl.config.data import DataOptions
from rl.data import models
from rl.data.hub import hub_name
from rl.data.rows.sources import read_rows
from rl.data.tokenizer import read_tokenizer
from rl.errors import ConfigError, ModelError
from rl.run import build
from rl.run.folder import RunFolder
from rl.run.load import load
from rl.run.prepare import prepare
from rl.stages.scorers import load_scorers
from rl.training.reward_model import RewardModelScorer
from rl.views.viewer.tokens import TokenTexts
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
    forget()
    return tmp_path / "hub"


def forget() -> None:
    """Makes this process look into the cache again."""
    models._fetched.cache_clear()
    models._failures.clear()


def add(
    cache: Path, commit: str = NEW, ref: str = "main", seed: int = 1, weights: bool = True
) -> Path:
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


@pytest.mark.parametrize(
    "name", ["org/name", "hf://org/name", "hf://org/name@v1.0", f"org/name@{OLD}", "hf://gpt3"]
)
def test_names_of_the_hub(name, cache):
    assert hub_name(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-0.6b",
        "qwen3-0.6",
        "a/b/c",
        "/a/b",
        "../a",
        "org/..",
        "hf://",
        "hf://a/b/c",
        "a/b@../x",
    ],
)
def test_other_names(name, cache):
    assert hub_name(name) is None and models.directory(name) is None


def test_a_preset_and_a_directory_come_first(cache):
    add(cache)
    Path("org").mkdir()
    assert hub_name("org/name") is None and hub_name("hf://org/name") == (
        "org/name",
        None,
    )  # a misspelt path
    Path("org/name").mkdir()
    assert models.directory("org/name") == Path("org/name")
    assert models.directory("qwen3-0.6b") is None


@pytest.mark.slow
def test_a_run_reads_model_tokenizer_and_stops_from_the_cache(cache):
    old, new = add(cache, OLD, "v1", seed=5), add(cache)
    for name, snapshot in (
        ("org/name", new),
        ("hf://org/name@v1", old),
        (f"hf://org/name@{OLD}", old),
    ):
        config = load(["run.yml"], [f"model={name}"])
        assert (
            config.model.source == f"hf://org/name@{snapshot.name}"
            and models.directory(name) == snapshot
        )
        prepared = prepare(config)
        assert prepared.stop_ids == (2, 7) and prepared.tokenizer.name_or_path == str(snapshot)
        model = build.first_model(config, prepared)
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
    for name, advice in (
        ("Org/Name", "hf download Org/Name`"),
        ("hf://Org/Name@v1", "Org/Name --revision v1`"),
    ):
        ended = subprocess.run(
            [*command, f"model={name}"], env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 4, ended.stderr
        for word in (
            "error in the model",
            name,
            "offline",
            "HF_HUB_OFFLINE",
            str(cache),
            advice,
            "local directory",
        ):
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
        build.first_model(config, prepared)
    prepared.close()
    (snapshot / "config.json").unlink()
    forget()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(["run.yml"], ["model=org/name"])


def test_only_safetensors_and_configurations_are_downloaded_and_weights_at_last(cache, monkeypatch):
    snapshot, calls = add(cache), []

    def download(name, **how):
        calls.append((name, how["revision"], how["allow_patterns"], how["ignore_patterns"]))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    listing = [
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "README.md",
            "modeling.py",
        ),
        *(
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
        ),
        *(
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "tf_model.h5",
            "onnx/model.safetensors",
            "x.pkl",
            "y.pt",
        ),
    ]
    assert (
        models.directory("hf://org/name@v1")
        == models.directory("hf://org/name@v1", weights=True)
        == snapshot
    )
    (name, revision, *first), (_, commit, *second) = calls
    assert (name, revision, commit) == (
        "org/name",
        "v1",
        NEW,
    )  # weights of the commit that the configuration is of
    taken = [
        list(filter_repo_objects(listing, allow_patterns=a, ignore_patterns=i))
        for a, i in (first, second)
    ]
    assert taken[0] == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ]
    assert taken[1] == [
        *taken[0],
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_weights_in_the_cache_are_compared_with_their_configuration(cache, capsys):
    """Those that are not all here yet are left to the run, which downloads them."""
    snapshot, check = add(cache), ["--check", "run.yml", "model=org/name"]
    keys = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(keys | {"intermediate_size": 24}))
    assert train_main(check) == 4
    assert (
        "model hf://org/name@" in (said := capsys.readouterr().err)
        and "[16, 16], expected [16, 24]" in said
    )
    (snapshot / "model.safetensors").unlink()
    assert train_main(check) == 0


def test_an_error_of_the_hub_is_named_and_asked_for_once(cache, monkeypatch):
    asked = []

    def answer(self, name, **how):
        asked.append((name, how["timeout"]))
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", answer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for _ in range(2):
        with pytest.raises(
            ModelError,
            match=r"org/name: .* OSError: no connection.*hf auth login.*hf download org/name",
        ):
            models.directory("org/name")
    assert asked == [("org/name", 10.0)]
    snapshot = add(cache)
    forget()
    assert (
        models.directory("org/name") == snapshot and len(asked) == 2
    )  # the hub does not answer, the cache has it
    assert (
        models.directory(f"org/name@{NEW}", weights=True) == snapshot and len(asked) == 2
    )  # a commit cannot change


@pytest.mark.slow
def test_without_a_network_it_is_exit_code_4_or_the_cache(cache):
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": "http://127.0.0.1:1",
    }
    command = [sys.executable, "-m", "rl.commands.cli", "--check", "run.yml", "model=org/name"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 4 and "Retrying" not in ended.stderr, ended.stderr
    for word in (
        "error in the model: model org/name",
        "Connect",
        str(cache),
        "hf download",
        "local directory",
    ):
        assert word in ended.stderr
    add(cache)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and f"hf://org/name@{NEW}" in ended.stdout, ended.stderr


def test_a_run_is_continued_with_its_commit_after_the_branch_has_moved(cache):
    add(cache, OLD)
    with RunFolder(load(["run.yml"], ["model=org/name", "run.dir=run"])):
        pass
    add(cache, NEW)
    forget()
    assert load(["run"]).model.source == f"hf://org/name@{OLD}"
    assert load(["run.yml"], ["model=org/name"]).model.source == f"hf://org/name@{NEW}"
    assert "org/name" not in Path("run.yml").read_text()
    (Path("run") / "events.jsonl").write_text('{"stage": "sft", "step": 1, "metrics": {}}\n')
    moved = load(["run.yml"], ["model=org/name", "run.dir=run"])
    with (
        pytest.raises(ConfigError, match=f"@{OLD} there, .*@{NEW} here.*rl-train run"),
        RunFolder(moved),
    ):
        pass


def test_a_tokenizer_of_the_hub_needs_no_model(cache, capsys):
    (add(cache) / "config.json").unlink()
    preset = f"model={{source: qwen3-0.6b, overrides: {json.dumps(SIZES | HEADS)}}}"
    config = load(["run.yml"], [preset, "tokenizer=org/name"])
    assert config.tokenizer is not None and config.tokenizer.source == f"hf://org/name@{NEW}"
    assert read_tokenizer(config)[0].get_vocab() == load_tokenizer("bytes").get_vocab()
    assert train_main(["--check", "run.yml", preset, "tokenizer=org/other"]) == 4
    assert "tokenizer org/other" in capsys.readouterr().err


def test_a_reward_model_of_the_hub(cache, capsys):
    snapshot, mesh = add(cache), layout({"fsdp": 1}, devices=jax.devices()[:1])
    trunk = sources.trunk(sources.read_config(snapshot))
    params = policy.create(trunk, seed=2).params
    shutil.rmtree(snapshot)
    graph = Graph(trunk, Runtime(), mesh)
    head = np.linspace(-1, 1, SIZES["hidden_size"], dtype=np.float32)
    classification.write(
        snapshot, graph, {path: params[path] for path in graph.paths}, head, pad_id=0
    )
    preset = f"model={{source: qwen3-0.6b, overrides: {json.dumps(SIZES | HEADS)}}}"
    rewards = "rewards={{functions: [{{name: reward_model, options: {{source: {}}}}}]}}"
    config = load(["run.yml"], [preset, "tokenizer=bytes", rewards.format("org/name@main")])
    (function,) = config.rewards.functions
    assert function.options["source"] == f"hf://org/name@{NEW}"
    scorers = load_scorers(config, [function.options["source"]], mesh)
    expected = RewardModelScorer.read(snapshot, Runtime(), mesh, 64)([[5, 9, 3]])
    assert scorers[f"hf://org/name@{NEW}"]([[5, 9, 3]]) == expected != [0.0]
    assert (
        train_main(["--check", "run.yml", preset, "tokenizer=bytes", rewards.format("org/other")])
        == 4
    )
    assert "reward model org/other" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_the_hub_completes_prompts(cache, capsys):
    snapshot, texts = add(cache), []
    Path("prompts.txt").write_text("one")
    how = [
        "--prompts",
        "prompts.txt",
        "--max-new-tokens",
        "3",
        "--temperature",
        "0",
        "--platform",
        "cpu",
    ]
    for name in (str(snapshot), "org/name"):
        assert cli.main(["generate", name, *how]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and json.loads(texts[0])["tokens"]
    assert cli.main(["chat", "hf://org/other", "--platform", "cpu"]) == 4
    assert "hf download org/other" in capsys.readouterr().err


def test_a_dataset_of_the_hub_with_a_revision(cache, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *names, **how: asked.append((*names, how)) or [{"prompt": "a"}],
    )
    for name, revision in (("org/rows", None), ("rows", None), ("hf://org/rows@v2", "v2")):
        assert next(read_rows(DataOptions(path=name), False))[1] == {"prompt": "a"}
        assert asked.pop() == (
            name.removeprefix("hf://").partition("@")[0],
            None,
            {"split": "train", "revision": revision},
        )
    for name in ("rows.jsonl", "../rows", "a/b/c"):
        with pytest.raises(ConfigError, match="no such file"):
            next(read_rows(DataOptions(path=name), False))


def test_the_viewer_takes_the_tokenizer_of_the_commit(cache):
    add(cache, OLD)
    folder = add(cache, NEW)
    Path("run").mkdir()
    Path("run/config.yml").write_text(f"model: {{source: 'hf://org/name@{NEW}'}}\n")
    texts = TokenTexts(Path("run"))
    assert texts.texts([20, 21]) is not None and texts.source == str(folder)
