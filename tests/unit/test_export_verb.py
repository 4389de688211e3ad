"""`rl export` on a small model with the bytes' tokenizer, and what keeps an export from appearing."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import yaml
from safetensors.numpy import load_file, save_file

import policy
from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
from policy.huggingface import reload, sources
from policy.huggingface.gguf import writer
from policy.huggingface.peft import writer as peft
from policy.huggingface.peft.targets import resolved
from rl.commands import cli
from rl.config.run import RunConfig
from rl.stages.export import card
from rl.stages.export.card import Origin, StageStep
from rollout.text.tokenizer import load_tokenizer

ROWS = [[5, 6, 7, 8], [9, 10, 11]]


def export(*arguments) -> int:
    return cli.main(["export", *map(str, arguments), "--platform", "cpu"])


def test_an_export_has_the_weights_in_another_type_and_every_other_file(
    small_model, tmp_path, capsys
):
    out = tmp_path / "out"
    assert export(small_model, out, "--dtype", "bfloat16") == 0
    assert "differ by at most 0.0e+00" in capsys.readouterr().out
    before, after = policy.load(small_model), policy.load(out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for path, weight in before.params.items():
        rounded = np.asarray(weight).astype("bfloat16").astype("float32")
        assert np.array_equal(rounded, np.asarray(after.params[path])), path
    assert (out / "tokenizer.json").read_bytes() == (small_model / "tokenizer.json").read_bytes()
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [load_tokenizer("bytes").eos_token_id, 151645]  # the preset's is the other
    facts = json.loads((out / "duet_export.json").read_text())
    assert facts["largest_difference"] == 0 and facts["compared_tokens"] > 100


def test_weights_that_change_on_their_way_to_the_disk_are_refused(
    small_model, tmp_path, capsys, monkeypatch
):
    def save(tensors, file, **how):
        name = "model.layers.1.self_attn.k_proj.weight"
        save_file(tensors | {name: np.roll(tensors[name], 1, 0)}, file, **how)

    monkeypatch.setattr(safetensors.numpy, "save_file", save)
    assert export(small_model, tmp_path / "out") == 4
    assert "another log-probability" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["cpu", "nowhere"])
def test_where_devices_have_no_room_the_cpu_compares(
    small_model, tmp_path, capsys, monkeypatch, where
):
    checked = []
    check = reload.check_model

    def without_room(written, directory, rows):
        checked.append(written.graph.layout.mesh.size)
        if len(checked) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return check(written, directory, rows)

    monkeypatch.setattr(reload, "check_model", without_room)
    if where == "nowhere":
        monkeypatch.setattr("policy.mesh.device_memory.host_memory", lambda: 1000)
    assert export(small_model, tmp_path / "out", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr()
    if where == "cpu":
        assert checked == [jax.device_count(), 1]
        assert "on the CPU" in printed.err and "differ by at most 0.0e+00" in printed.out
    else:
        assert len(checked) == 1
        assert "not read back" in printed.err and "It was not read back" in printed.out


def test_only_what_an_export_wrote_is_replaced(small_model, tmp_path, capsys):
    own, out = tmp_path / "own", tmp_path / "out"
    own.mkdir()
    (own / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (own, tmp_path / "file", Path(".."), tmp_path / "a.replaced-export"):
        assert export(small_model, target, "--force") == 2
    out.mkdir()  # an empty folder is free
    assert export(small_model, out) == 0
    assert export(small_model, out) == 2 and "--force" in capsys.readouterr().err
    assert export(small_model, out, "--force", "--dtype", "bfloat16") == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    (out / "notes.txt").write_text("mine")
    assert export(small_model, out, "--force") == 2 and "notes.txt" in capsys.readouterr().err
    assert (out / "notes.txt").read_text() == "mine" and (own / "file").read_text() == "mine"
    (tmp_path / "new.unfinished-export").mkdir()
    assert export(small_model, tmp_path / "new") == 2
    assert (tmp_path / "new.unfinished-export").is_dir()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--step", "3"], 2, "no folder of a run"),
        (["--merged"], 2, "has no adapter"),
        (["--adapter", "--gguf", "f16"], 2, "--adapter: a GGUF file has it merged"),
    ],
)
def test_what_is_refused(small_model, tmp_path, capsys, arguments, code, message):
    assert export(small_model, tmp_path / "out", *arguments) == code
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_missing_model_is_refused(tmp_path, capsys):
    assert export(tmp_path / "absent", tmp_path / "out") == 4
    assert "no config.json there" in capsys.readouterr().err


def test_a_reward_model_gives_transformers_the_same_scores(small_model, tmp_path, capsys):
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

    source = tmp_path / "source"
    torch.manual_seed(0)
    labels = {"id2label": {0: "good"}, "label2id": {"good": 0}, "pad_token_id": 0}
    old = Qwen3ForSequenceClassification.from_pretrained(small_model, **labels)
    old.save_pretrained(source)
    load_tokenizer("bytes").save_pretrained(source)
    assert export(source, tmp_path / "gguf", "--gguf", "f16") == 2
    assert "reward model" in capsys.readouterr().err
    out = tmp_path / "out"
    assert export(source, out, "--dtype", "float32") == 0, capsys.readouterr().err
    assert "the scores after" in capsys.readouterr().out
    read, info = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert read.config.id2label == {0: "good"}
    with torch.no_grad():
        scores = [each.eval()(torch.tensor([ROWS[0]])).logits for each in (old, read)]
    assert torch.equal(*scores) and scores[0].abs() > 1e-3
    assert yaml.safe_load((out / "README.md").read_text().split("---")[1])["pipeline_tag"] == (
        "text-classification"
    )
    names = {each.name for each in out.iterdir()}
    assert {"tokenizer.json", "duet_export.json", "model.safetensors"} <= names


def test_weights_that_no_text_reaches_are_compared_too(tmp_path):
    small = {"num_hidden_layers": 2, "duet": {"multi_token_prediction": {"depth": 1}}}
    model = policy.create(sources.preset("tiny-deepseek", small), seed=3)
    assert any(path.startswith("mtp.") for path in model.params)
    policy.save(model, tmp_path)
    assert reload.check_model(model, tmp_path, ROWS) == reload.Proof(0.0, 5)
    file = tmp_path / "multi_token_prediction.safetensors"
    file = file if file.exists() else tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "eh_proj" in name)
    save_file(tensors | {name: tensors[name] + 1}, file)
    with pytest.raises(reload.NotReloaded, match="mtp"):
        reload.check_model(model, tmp_path, ROWS)


def test_a_killed_export_leaves_a_folder_that_the_next_one_takes(small_model, tmp_path):
    unfinished = tmp_path / "out.unfinished-export"
    unfinished.mkdir()
    (unfinished / "duet_export.json").write_text("{}\n")
    shutil.copy(small_model / "model.safetensors", unfinished)
    assert export(small_model, tmp_path / "out") == 0
    assert not unfinished.exists()


@pytest.mark.parametrize("moved", ["one", "both"])
def test_an_export_killed_while_it_replaces_another_is_put_back(small_model, tmp_path, moved):
    """moved: how many of the two renames were done."""
    out, old = tmp_path / "out", tmp_path / "out.replaced-export"
    assert export(small_model, out) == 0
    if moved == "both":
        shutil.copytree(out, old)
        (old / "model.safetensors").unlink()  # it was being removed
    else:
        out.rename(old)
    assert export(small_model, out) == 2  # without --force the first export stays
    assert (out / "model.safetensors").is_file() and not old.exists()
    assert export(small_model, out, "--force", "--dtype", "bfloat16") == 0
    assert {each.name for each in tmp_path.iterdir()} == {"out"}
    old.mkdir()
    (old / "file").write_text("mine")
    assert export(small_model, out, "--force") == 2
    assert (old / "file").read_text() == "mine"


def test_stops_that_a_gguf_file_has_no_keys_for_are_named(
    small_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    shutil.copytree(small_model, model)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 10, 11, 12]}')
    assert export(model, tmp_path / "out", "--gguf", "f16") == 0
    printed = capsys.readouterr().err
    assert "these tokens do not: 12" in printed
    assert "no merges" in printed  # of single bytes


def test_one_gguf_file_is_written_and_read_like_any_model(
    small_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert export(small_model, out, "--gguf", "f16") == 0, capsys.readouterr().err
    file = out / "out-F16.gguf"
    names = {each.name for each in out.iterdir()}
    assert names == {"README.md", "duet_export.json", file.name}
    before, after = policy.load(small_model), policy.load(file)
    for path, weight in before.params.items():
        rounded = np.asarray(weight).astype("float16" if weight.ndim > 2 else "float32")
        assert np.allclose(rounded, np.asarray(after.params[path]), atol=1e-3), path
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    capsys.readouterr()
    options = ["--prompts", prompts, "--max-new-tokens", 4, "--temperature", 0, "--platform", "cpu"]
    answers = []
    for model in (small_model, file):
        assert cli.main([*map(str, ["generate", model, *options])]) == 0
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1]
    again = tmp_path / "again"
    assert export(file, again, "--dtype", "float32") == 0
    assert policy.load(again).params.keys() == before.params.keys()


def test_a_file_that_changes_on_its_way_to_the_disk_is_refused(
    small_model, tmp_path, capsys, monkeypatch
):
    write = writer.write

    def write_and_change(file, model, kind, vocabulary, name):
        write(file, model, kind, vocabulary, name)
        with file.open("r+b") as out:
            out.seek(-8, 2)
            out.write(b"\x01" * 8)

    monkeypatch.setattr(writer, "write", write_and_change)
    assert export(small_model, tmp_path / "out", "--gguf", "q8_0") == 4
    assert "is not what was written" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_models_that_gguf_does_not_know_are_refused_before_anything_is_written(tmp_path, capsys):
    model = tmp_path / "model"
    policy.save(policy.create("tiny-deepseek", seed=1), model)
    load_tokenizer("bytes").save_pretrained(model)
    assert export(model, tmp_path / "out", "--gguf", "f16") == 2
    text = capsys.readouterr().err
    assert "not written as GGUF" in text and "qwen3_moe" in text
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


class Hub:
    """What the hub holds and was asked; its methods take what those of HfApi take."""

    def __init__(self, monkeypatch, files=(), error=None):
        self.api = create_autospec(huggingface_hub.HfApi, instance=True)
        self.api.endpoint = "https://huggingface.co"
        self.api.repo_exists.return_value = bool(files)
        self.api.list_repo_files.return_value = list(files)
        self.api.upload_folder.side_effect = error or self._take
        self.uploaded = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self.api)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secretsecret")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def _take(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        names = {file.name for file in Path(folder_path).iterdir()}
        self.uploaded.append((repo_id, names - set(ignore_patterns)))


def test_an_export_is_pushed_in_one_commit(small_model, tmp_path, capsys, monkeypatch):
    hub = Hub(monkeypatch)
    out = tmp_path / "out"
    assert export(small_model, out, "--push", "org/name", "--private") == 0
    hub.api.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    ((repository, names),) = hub.uploaded
    assert repository == "org/name"
    assert names == {file.name for file in out.iterdir()} - {"duet_export.json"}
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= names
    printed = capsys.readouterr()
    assert "https://huggingface.co/org/name" in printed.out
    assert "hf_secret" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda hub, patch: None, ["--push", "name"], "org/name"),
        (lambda hub, patch: None, ["--private"], "--push"),
        (
            lambda hub, patch: patch.setattr(huggingface_hub, "get_token", lambda: None),
            ["--push", "org/name"],
            "HF_TOKEN",
        ),
        (
            lambda hub, patch: setattr(
                hub.api.whoami, "side_effect", OSError("no hf_secretsecret")
            ),
            ["--push", "org/name"],
            "no \\*\\*\\*",
        ),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    small_model, tmp_path, capsys, monkeypatch, change, arguments, message
):
    change(Hub(monkeypatch), monkeypatch)
    assert export(small_model, tmp_path / "out", *arguments) == 2
    text = capsys.readouterr().err
    assert re.search(message, text) and "hf_secret" not in text
    assert not any(tmp_path.iterdir())


def test_a_repository_with_files_gets_a_commit_only_with_force(
    small_model, tmp_path, capsys, monkeypatch
):
    hub = Hub(monkeypatch, files=[".gitattributes", "model.safetensors"])
    assert export(small_model, tmp_path / "out", "--push", "org/name") == 2
    assert "--force" in capsys.readouterr().err and not hub.uploaded
    assert export(small_model, tmp_path / "out", "--push", "org/name", "--force") == 0
    assert len(hub.uploaded) == 1


def test_an_upload_that_fails_leaves_the_directory(small_model, tmp_path, capsys, monkeypatch):
    Hub(monkeypatch, error=OSError("broken pipe with hf_secretsecret"))
    out = tmp_path / "out"
    assert export(small_model, out, "--push", "org/name") == 5
    text = capsys.readouterr().err
    assert "hf upload org/name" in text and "hf_secret" not in text
    assert (out / "model.safetensors").is_file()


def test_a_card_says_data_evaluations_and_configuration(tmp_path):
    events = [("sft", 4, 0.25), ("grpo", 2, 0.5), ("grpo", 4, 1.0)]
    lines = [
        {
            "stage": stage,
            "step": step,
            "metrics": {
                "eval/greedy_accuracy": share,
                "eval/problems": 104,
                "eval/unscored": 4,
            },
        }
        for stage, step, share in events
    ]
    run, source, out = tmp_path / "run", tmp_path / "source", tmp_path / "out"
    for each in (run, source, out):
        each.mkdir()
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (source / "LICENSE").write_text("a licence")
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\nThe base.\n")
    config = RunConfig.model_validate(
        {
            "model": "tiny-deepseek",
            "tokenizer": "bytes",
            "data": {"path": "https://me:word@host/rows.jsonl"},
            "rewards": {"functions": ["exact_answer"]},
            "stages": [{"algorithm": "sft", "steps": 4}, {"algorithm": "grpo", "steps": 4}],
        }
    )
    origin = Origin("run", "org/base", source, run, config, StageStep("grpo", 3))
    card.write(out, origin, "Weights.", card.Listing("transformers"))
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "org/base" and front["license"] == "apache-2.0"
    assert front["tags"] == ["duet-rl", "sft", "grpo"]
    # Wilson's interval of 25 and of 50 of 100, as in textbooks
    assert "| sft | 4 | greedy_accuracy | 0.250 | 0.175 to 0.343 | 100 |" in text
    assert "| grpo | 2 | greedy_accuracy | 0.500 | 0.404 to 0.596 | 100 |" in text
    assert "1.000" not in text and "After step 3 of the stage grpo" in text
    assert "me:word" not in text and "rows.jsonl" in text
    assert (out / "LICENSE").read_text() == "a licence"


def test_an_adapter_over_weights_in_four_bits_is_compared_over_these(small_model, tmp_path):
    """So the bits of the base are no difference, and another adapter is one."""
    base = policy.load(small_model, base_weights="nf4", base_block=32)
    spec = resolved(base.graph, AdapterSpec(rank=2, alpha=4, targets=("q_proj", "down_proj")))
    graph = base.graph.with_runtime(adapter=spec)
    drawn = np.random.default_rng(0)
    arrays = {
        path: jnp.asarray(0.1 * drawn.standard_normal(shape.shape), shape.dtype)
        for path, shape in Adapters(graph).shapes.items()
    }
    model = policy.Model(graph, {**base.params, **arrays})
    peft.write_adapter(tmp_path, graph, spec, arrays, str(small_model))
    assert reload.check_adapter(model, tmp_path, ROWS).difference < 1e-6
    changed = {path: 1.1 * array for path, array in arrays.items()}
    with pytest.raises(reload.NotReloaded, match="log-probability"):
        reload.check_adapter(policy.Model(graph, {**base.params, **changed}), tmp_path, ROWS)
