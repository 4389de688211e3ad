"""Model directories: what is read back is what was written, and every fault is named. Needs no torch."""

import json

import numpy as np
import pytest
from oracles import configuration, edit_config, random_model, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families, hub
from policy.hf import UnsupportedModel
from policy.hub import ModelFileError


@pytest.fixture
def directory(tmp_path):
    policy.save(random_model(families.read(configuration("DeepseekV3"))), tmp_path)
    return tmp_path


def edit_weights(directory, change):
    state = load_file(directory / hub.SINGLE)
    change(state)
    save_file(state, directory / hub.SINGLE, metadata={"format": "pt"})


def refused(directory, *words, error=ModelFileError):
    with pytest.raises(error) as caught:
        policy.load(directory)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_missing_tensor_is_named(directory):
    edit_weights(directory, lambda state: state.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    refused(directory, "missing tensor model.layers.2.mlp.experts.5.up_proj.weight", "[24, 32]", str(directory))


def test_a_missing_head_is_named(directory):
    edit_weights(directory, lambda state: state.pop("lm_head.weight"))
    refused(directory, "missing tensor lm_head.weight")


def test_extra_tensors_are_named(directory):
    edit_weights(directory, lambda state: state.update({f"model.layers.0.odd.{i}": np.ones(2) for i in range(7)}))
    refused(directory, "unexpected tensors model.layers.0.odd.0", "and 2 more")


def test_a_tensor_of_the_wrong_shape_is_named(directory):
    edit_weights(directory, lambda state: state.update({"model.norm.weight": np.ones(31, np.float32)}))
    refused(directory, "model.norm.weight has shape [31], expected [32]")


def test_quantised_tensors_are_refused(directory):
    edit_weights(directory, lambda state: state.update({"model.norm.weight": np.ones(32, np.int8)}))
    refused(directory, "model.norm.weight is I8")


def test_layers_that_predict_further_tokens_are_skipped(directory):
    plain = policy.load(directory)
    extra = {f"model.layers.{n}.{name}": np.ones(3, np.float32) for n in (3, 4) for name in ("eh_proj.weight", "a.b")}
    edit_weights(directory, lambda state: state.update(extra))
    loaded = policy.load(directory)
    assert all(np.array_equal(loaded.params[path], array) for path, array in plain.params.items())


def test_directories_without_weights_or_configuration_are_named(directory, tmp_path):
    (directory / hub.SINGLE).unlink()
    refused(directory, str(directory), "no *.safetensors file")
    (directory / "config.json").unlink()
    refused(directory, str(directory / "config.json"), "no such file")
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere" / "config.json"), "no such file")


def test_a_truncated_file_is_named(directory):
    path = directory / hub.SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, str(path), "not a whole safetensors file")


def test_a_listed_shard_that_is_absent_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    model = random_model(families.read(configuration("Qwen3")))
    policy.save(model, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, str(shard), hub.INDEX)
    (tmp_path / hub.INDEX).write_text("{}")
    refused(tmp_path, hub.INDEX, "weight_map")


def test_saving_again_leaves_nothing_of_the_old_model(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    policy.save(random_model(families.read(configuration("Qwen3"))), tmp_path)
    monkeypatch.undo()
    model = random_model(families.read(configuration("Llama")), seed=1)
    policy.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert policy.load(tmp_path).config.layers == model.config.layers


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", ["config.json:1", "not valid JSON"]), ("[]", ["list"]), ('{"a": 1,\n"b": }', ["config.json:2"])],
)
def test_a_broken_configuration_is_located(directory, text, words):
    (directory / "config.json").write_text(text)
    refused(directory, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"},
            ["MysteryForCausalLM", "mystery", "llama"],
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "fp8", "mxfp4"]),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            ["quantization_config", "weight_block_size"],
        ),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"hidden_act": "mish"}, ["hidden_act", "mish", "silu"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type", "longrope"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters.full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, ["topk_method", "noaux_tc"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_configuration_that_cannot_be_computed_is_refused_by_key(directory, change, words):
    def apply(config):
        for key, value in change.items():
            config.pop(key, None) if value is ... else config.update({key: value})

    edit_config(directory, apply)
    refused(directory, *words, error=UnsupportedModel)


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (["full_attention"], "1 entries for 3 layers"),
        (["full_attention", "chunked_attention", "full_attention"], "chunked"),
    ],
)
def test_layer_types_must_fit(types, words):
    with pytest.raises(UnsupportedModel, match=words):
        families.read(configuration("Qwen3", layer_types=types))


def test_architectures_decide_before_model_type():
    config = families.read(configuration("DeepseekV2") | {"model_type": "deepseek_v3"})
    assert config.layers[-1].feed_forward.router.score == "softmax"
    config = families.read(configuration("DeepseekV3") | {"model_type": "llama"})
    assert config.family == "deepseek" and config.layers[-1].feed_forward.router.score == "sigmoid"
    alone = configuration("DeepseekV3")
    del alone["architectures"]
    assert families.read(alone).layers == config.layers


def test_a_changed_configuration_is_not_written(directory):
    import dataclasses

    model = random_model(dataclasses.replace(families.read(configuration("Qwen3")), tied_head=True))
    with pytest.raises(ValueError, match="no longer matches"):
        policy.save(model, directory / "out")
    assert not (directory / "out").exists()


def test_other_keys_of_the_configuration_survive(directory):
    edit_config(directory, lambda config: config.update({"my_note": [1, 2], "torch_dtype": "bfloat16"}))
    policy.save(policy.load(directory), directory / "out")
    written = json.loads((directory / "out" / "config.json").read_text())
    assert written["my_note"] == [1, 2] and written["dtype"] == "float32" and "torch_dtype" not in written


def test_loading_places_weights_that_compute(directory):
    """Not just equal arrays: the loaded model is usable as it is."""
    row = tokens(1, 8)
    logits = np.asarray(policy.load(directory).logits(row))
    assert logits.shape == (1, 8, 160) and np.isfinite(logits).all() and logits.std() > 0.1
