"""A run whose first stage trains the weights and whose second trains an adapter over them: what it
leaves on the disk, and that it goes on to the same bits, over the same base only."""

import json
import shutil
from pathlib import Path

import launch
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import policy
from policy.adapters.learning import is_adapter
from policy.huggingface.peft import writer
from rl.commands import cli
from rl.run.unfinished.weights import CheckpointWeights

STEP = {"sampling": {"max_new_tokens": 6}, "optimizer": {"learning_rate": 1e-2}}
STAGES = [
    {"algorithm": "sft", "trains": "weights", "steps": 1, "prompts_per_step": 8, **STEP},
    {
        "algorithm": {"name": "grpo", "kl_coef": 0.05},
        "steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        **STEP,
    },
]
GIVEN = (
    *launch.LIGHT,
    "run.checkpoint_every=1",
    "run.keep_checkpoints=9",
    "model.adapter={rank: 2}",
    "export.merged=true",
    f"stages={json.dumps(STAGES)}",
)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory) -> Path:
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("adapter") / "run"
    assert launch.train(directory, *GIVEN) == 0
    return directory


def tensors(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


def assert_same(one: Path, other: Path) -> None:
    """Every number, sample and weight, bit by bit."""
    assert launch.numbers(one) == launch.numbers(other)
    assert launch.samples(one) == launch.samples(other)
    for folder in ("base", "export", "export/merged"):
        assert tensors(one / folder) == tensors(other / folder) != {}


def stopped_after(run: Path, directory: Path, number: int) -> Path:
    """A copy of a run as a kill after the checkpoint with this number leaves it."""
    shutil.copytree(run, directory)
    shutil.rmtree(directory / "export")
    for checkpoint in (directory / "checkpoints").iterdir():
        if int(checkpoint.name) > number:
            shutil.rmtree(checkpoint)
    return directory


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_of_an_adapter_names_the_base_and_does_not_hold_it(adapter_run):
    *_, newest = sorted((adapter_run / "checkpoints").iterdir())
    arrays = json.loads((newest / "manifest.json").read_text())["arrays"]
    assert any(name.endswith(".lora_a") for name in arrays)
    assert not any(name.endswith(("q_proj", "embed_tokens", "o_proj")) for name in arrays)
    base = json.loads((newest / "host.json").read_text())["base"]
    assert base["source"] == str(adapter_run / "base") and len(base["sha256"]) == 64
    assert base["dtype"] == "float32" and base["base_weights"] is None


def test_a_run_goes_on_from_each_checkpoint_to_the_same_bits(adapter_run, tmp_path):
    first, second, _ = checkpoints(adapter_run)  # of the stage of the weights, of the adapter
    for number in (first, second):
        directory = stopped_after(adapter_run, tmp_path / str(number), number)
        assert launch.train(directory, *GIVEN) == 0
        assert_same(directory, adapter_run)


def test_a_run_over_another_base_stops(adapter_run, tmp_path, capsys):
    directory = stopped_after(adapter_run, tmp_path / "run", checkpoints(adapter_run)[1])
    file = directory / "base" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert launch.train(directory, *GIVEN) == 4
    assert "is another one" in capsys.readouterr().err
    shutil.rmtree(directory / "base")
    assert launch.train(directory, *GIVEN) == 4
    assert f"{directory / 'base'}: no config.json there" in capsys.readouterr().err


def test_the_export_is_an_adapter_of_peft_over_the_base_of_the_run(adapter_run):
    """The adapter over its base, the merged model, and the newest checkpoint are one policy."""
    export = adapter_run / "export"
    config = json.loads((export / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../base" and config["r"] == 2
    assert not (export / "config.json").exists() and (export / "tokenizer.json").exists()
    assert "base/ of the run, with an adapter" in (export / "merged" / "README.md").read_text()
    row = np.arange(1, 13)[None] % 16
    base = policy.load(adapter_run / "base").logits(row)
    adapted = policy.load(export).logits(row)
    assert np.abs(adapted - base).max() > 0.1
    merged = policy.load(export / "merged").logits(row)
    checkpoint = CheckpointWeights(adapter_run).load("float32")
    np.testing.assert_allclose(merged, adapted, atol=1e-5)
    np.testing.assert_allclose(checkpoint.logits(row), adapted, atol=1e-5)
    assert any(map(is_adapter, checkpoint.params))


def configuration(tmp_path: Path, name: str, model: dict, stage: dict) -> tuple[Path, Path]:
    """The file of a run of one stage from a model, and its directory."""
    directory = tmp_path / name
    config = yaml.safe_load(launch.SMALL.read_text())
    config |= {"model": model, "stages": [stage], "run": {"dir": str(directory)}}
    file = tmp_path / f"{name}.yml"
    file.write_text(yaml.safe_dump(config | {"evaluation": None}))
    return file, directory


def test_a_run_starts_from_an_exported_adapter(adapter_run, tmp_path):
    """Its rate is so small that it leaves the adapter as it was."""
    export = adapter_run / "export"
    stage = {**STAGES[0], "trains": "adapter", "optimizer": {"learning_rate": 1e-12}}
    model = {"source": str(adapter_run / "base"), "adapter": {"source": str(export)}}
    file, directory = configuration(tmp_path, "run", model, stage)
    assert launch.cli.train_main([str(file)]) == 0
    before = load_file(export / "adapter_model.safetensors")
    after = load_file(directory / "export" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor, atol=1e-9)
    written = json.loads((directory / "export" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(adapter_run / "base")
    assert (written["r"], written["lora_alpha"]) == (2, 32) and not (directory / "base").exists()


def test_rollouts_are_those_of_the_adapter_merged_or_not(adapter_run, tmp_path):
    base = {"source": str(adapter_run / "base")}
    export = str(adapter_run / "export")
    models = {"base": base, "adapter": base | {"adapter": {"source": export}}}
    models["merged"] = {"source": export}
    sampled = {}
    for name, model in models.items():
        file, directory = configuration(tmp_path, name, model, STAGES[1] | {"steps": 1})
        assert launch.cli.main(["rollout", str(file)]) == 0
        sampled[name] = [row["tokens"] for row in launch.trained(directory)]
    assert sampled["adapter"] == sampled["merged"] != sampled["base"]


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(adapter_run, tmp_path):
    directory = tmp_path / "run"
    given = launch.arguments(directory, *GIVEN)
    moments = [
        (directory / "base.tmp").exists,
        (directory / "base").exists,
        (directory / "base.json").exists,
        lambda: launch.lines(directory) >= 3,
        lambda: any((directory / "checkpoints").glob("*.tmp-*")),
        lambda: (directory / "export.tmp").exists() or (directory / "export").exists(),
    ]
    kills = [launch.killed(given, moment) for moment in moments]
    assert sum(kills) >= 4, kills
    assert launch.train(directory, *GIVEN) == 0
    assert_same(directory, adapter_run)


def test_the_verb_writes_what_the_run_exports(adapter_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["export", str(adapter_run), str(out), "--platform", "cpu"]) == 0
    for folder in ("", "merged"):
        assert tensors(out / folder) == tensors(adapter_run / "export" / folder) != {}
    config = json.loads((out / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == (adapter_run / "base").resolve()
    step = tmp_path / "step"
    options = ["--step", "grpo:1", "--merged", "--platform", "cpu"]
    assert cli.main(["export", str(adapter_run), str(step), *options]) == 0, capsys.readouterr().err
    earlier = policy.load(step)
    assert not any(map(is_adapter, earlier.params))
    assert tensors(step) != tensors(out / "merged")


def test_an_adapter_that_changes_on_its_way_to_the_disk_is_refused(
    adapter_run, tmp_path, capsys, monkeypatch
):
    save = writer._save
    monkeypatch.setattr(
        writer, "_save", lambda at, tensors, config: save(at, tensors, config | {"lora_alpha": 7})
    )
    options = ["--adapter", "--platform", "cpu"]
    assert cli.main(["export", str(adapter_run), str(tmp_path / "out"), *options]) == 4
    assert "log-probability" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
