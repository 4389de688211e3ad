"""A model directory that is or holds an adapter of PEFT: it is the adapter over its base wherever a
model is named."""

import json
import shutil

import adapted
import numpy as np
import pytest
from oracles import random_model, short, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.config import Runtime
from policy.huggingface import classification, sources
from policy.huggingface.peft.writer import write_adapter
from policy.huggingface.tensorfiles import SINGLE, ModelFileError
from policy.mesh.sharding import layout
from rl.data import models
from rl.errors import ModelError

CONFIG = "adapter_config.json"
ROW = tokens(1, 9)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base and an adapter over it, and the model that they are."""
    folder = tmp_path_factory.mktemp("llama")
    base = random_model(families.read(short("Llama")))
    model = adapted.with_adapter(base)
    policy.save(base, folder / "base")
    spec = model.graph.runtime.adapter
    assert spec is not None
    arrays = {path: array for path, array in model.params.items() if path not in base.params}
    write_adapter(folder / "adapter", base.graph, spec, arrays, "../base")
    return folder, adapted.merged(model)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "models")


def named(folder, name) -> None:
    file = folder / "adapter" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))


def test_an_adapter_is_read_over_its_base(made, folder, monkeypatch):
    expected = made[1].logits(ROW)
    base = policy.load(folder / "base").logits(ROW)
    assert np.abs(expected - base).max() > 0.5
    loaded = policy.load(folder / "adapter")
    np.testing.assert_allclose(loaded.logits(ROW), expected, atol=2e-5)
    assert loaded.source == str(folder / "adapter" / ".." / "base")
    named(folder, str(folder / "base"))
    np.testing.assert_allclose(policy.load(folder / "adapter").logits(ROW), expected, atol=2e-5)
    together = shutil.copytree(folder / "base", folder / "together")
    for file in (folder / "adapter").iterdir():
        shutil.copy(file, together)
    np.testing.assert_allclose(policy.load(together).logits(ROW), expected, atol=2e-5)


def test_an_adapter_is_merged_before_weights_are_stored_in_few_bits(made, folder):
    quantised = policy.load(folder / "adapter", base_weights="int8")
    policy.save(made[1], folder / "merged")
    direct = policy.load(folder / "merged", base_weights="int8")
    np.testing.assert_allclose(quantised.logits(ROW), direct.logits(ROW), atol=2e-2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "names no base of the adapter"),
        ("no/such-model", "no/such-model is no directory of a model here.*hf download"),
        ("../adapter", "holds an adapter too"),
    ],
)
def test_an_adapter_without_a_base_is_refused(folder, name, message):
    named(folder, name)
    with pytest.raises(ModelFileError, match=message):
        policy.load(folder / "adapter")
    with pytest.raises(ModelError, match="adapter"):
        models.check_files(str(folder / "adapter"))


def test_an_adapter_that_lacks_its_configuration_is_never_left_out(folder):
    (folder / "adapter" / CONFIG).unlink()
    shutil.copy(folder / "adapter" / "adapter_model.safetensors", folder / "base")
    with pytest.raises(ModelFileError, match=f"{CONFIG}: no such file"):
        policy.load(folder / "base")


def test_a_base_of_the_hub_is_looked_for_in_the_cache(made, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    snapshot = folder / "hub" / "models--org--llama" / "snapshots" / ("0" * 40)
    shutil.copytree(folder / "base", snapshot)
    (folder / "hub" / "models--org--llama" / "refs").mkdir()
    (folder / "hub" / "models--org--llama" / "refs" / "main").write_text("0" * 40)
    named(folder, "org/llama")
    assert sources.base_of(folder / "adapter").name == "0" * 40


def test_a_reward_model_behind_an_adapter_has_its_score(folder):
    score = np.random.default_rng(3).normal(size=(1, 32)).astype(np.float32)
    file = folder / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.score.weight": score}, file)
    config = folder / "adapter" / CONFIG
    keys = json.loads(config.read_text()) | {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    config.write_text(json.dumps(keys))
    classification.check(folder / "adapter")
    read = classification.read(folder / "adapter", Runtime(), layout({"fsdp": 1}))
    np.testing.assert_array_equal(read.score, score[0])
    base = classification.sources.classifier(folder / "adapter")
    assert base.hidden_size == 32
    plain = load_file(folder / "base" / SINGLE)
    assert not np.allclose(
        np.asarray(read.params["stacks.0.layers.0.mixer.o_proj"])[0].reshape(-1),
        plain["model.layers.0.self_attn.o_proj.weight"].T.reshape(-1),
    )
