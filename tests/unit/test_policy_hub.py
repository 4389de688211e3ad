"""Model directories: what is read back is what was written, and every fault is named. Needs no
torch."""

import json

import numpy as np
import pytest
from oracles import configuration, edit_config, random_model, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families
from policy.fields import names
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import model_directory
from policy.huggingface.model_directory import ModelFileError


@pytest.fixture
def directory(tmp_path):
    policy.save(random_model(families.read(configuration("DeepseekV3"))), tmp_path)
    return tmp_path


def edit_weights(directory, change):
    state = load_file(directory / model_directory.SINGLE)
    change(state)
    save_file(state, directory / model_directory.SINGLE, metadata={"format": "pt"})


def same_weights(one, other):
    assert one.params.keys() == other.params.keys()
    for path, array in one.params.items():
        np.testing.assert_array_equal(
            np.asarray(other.params[path]), np.asarray(array), err_msg=path
        )


def refused(directory, *words, error=ModelFileError):
    with pytest.raises(error) as caught:
        policy.load(directory)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_missing_tensor_is_named(directory):
    edit_weights(directory, lambda state: state.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    refused(
        directory,
        "missing tensor model.layers.2.mlp.experts.5.up_proj.weight",
        "[24, 32]",
        str(directory),
    )


def test_a_missing_head_is_named(directory):
    edit_weights(directory, lambda state: state.pop("lm_head.weight"))
    refused(directory, "missing tensor lm_head.weight")


def test_extra_tensors_are_named(directory):
    edit_weights(
        directory,
        lambda state: state.update({f"model.layers.0.odd.{i}": np.ones(2) for i in range(7)}),
    )
    refused(directory, "unexpected tensors model.layers.0.odd.0", "and 2 more")


def test_a_tensor_of_the_wrong_shape_is_named(directory):
    edit_weights(
        directory, lambda state: state.update({"model.norm.weight": np.ones(31, np.float32)})
    )
    refused(directory, "model.norm.weight has shape [31], expected [32]")


def test_quantised_tensors_are_refused(directory):
    edit_weights(directory, lambda state: state.update({"model.norm.weight": np.ones(32, np.int8)}))
    refused(directory, "model.norm.weight is I8")


def test_layers_that_predict_further_tokens_are_skipped(directory):
    plain = policy.load(directory)
    extra = {
        f"model.layers.{n}.{name}": np.ones(3, np.float32)
        for n in (3, 4)
        for name in ("eh_proj.weight", "a.b")
    }
    edit_weights(directory, lambda state: state.update(extra))
    same_weights(plain, policy.load(directory))


def test_directories_without_weights_or_configuration_are_named(directory, tmp_path):
    (directory / model_directory.SINGLE).unlink()
    refused(directory, str(directory), "no *.safetensors file")
    (directory / "config.json").unlink()
    refused(directory, str(directory / "config.json"), "no such file")
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere" / "config.json"), "no such file")


def test_a_truncated_file_is_named(directory):
    path = directory / model_directory.SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, str(path), "not a complete safetensors file")


def test_a_listed_shard_that_is_absent_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model_directory, "SHARD_BYTES", 20_000)
    model = random_model(families.read(configuration("Qwen3")))
    policy.save(model, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, str(shard), model_directory.INDEX)
    (tmp_path / model_directory.INDEX).write_text("{}")
    refused(tmp_path, model_directory.INDEX, "weight_map")


def test_saving_again_leaves_nothing_of_the_old_model(tmp_path, monkeypatch):
    monkeypatch.setattr(model_directory, "SHARD_BYTES", 20_000)
    policy.save(random_model(families.read(configuration("Qwen3"))), tmp_path)
    monkeypatch.undo()
    model = random_model(families.read(configuration("Llama")), seed=1)
    policy.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert policy.load(tmp_path).config.layers == model.config.layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["config.json:1", "not valid JSON"]),
        ("[]", ["list"]),
        ('{"a": 1,\n"b": }', ["config.json:2"]),
    ],
)
def test_a_broken_configuration_is_located(directory, text, words):
    (directory / "config.json").write_text(text)
    refused(directory, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"},
            ["MysteryForCausalLM", "mystery", "The nearest is deepseek"],
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            ["quantization_config", "gptq", "fp8", "mxfp4"],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            ["quantization_config", "weight_block_size"],
        ),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"hidden_act": "mish"}, ["hidden_act", "mish", "silu"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_type", "dynamic"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["short_factor"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters.full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"},
            ["topk_method", "noaux_tc"],
        ),
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
    edit_config(
        directory, lambda config: config.update({"my_note": [1, 2], "torch_dtype": "bfloat16"})
    )
    policy.save(policy.load(directory), directory / "out")
    written = json.loads((directory / "out" / "config.json").read_text())
    assert (
        written["my_note"] == [1, 2]
        and written["dtype"] == "float32"
        and "torch_dtype" not in written
    )


def test_loading_places_weights_that_compute(directory):
    """Not just equal arrays: the loaded model is usable as it is."""
    row = tokens(1, 8)
    logits = np.asarray(policy.load(directory).logits(row))
    assert logits.shape == (1, 8, 160) and np.isfinite(logits).all() and logits.std() > 0.1


def renamed(state, rename):
    for name in list(state):
        state[rename(name)] = state.pop(name)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_inside_a_multimodal_one_is_read(directory, prefix):
    """Under either prefix, with the towers of other modalities next to it and its configuration in
    text_config."""
    plain = policy.load(directory)
    head = "language_model.lm_head." if prefix == "language_model.model." else "lm_head."
    extra = (
        "vision_tower.a.weight",
        "model.visual.b",
        "multi_modal_projector.c",
        "mtp.d",
        "model.embed_audio.e",
    )

    def change(state):
        renamed(state, lambda name: name.replace("model.", prefix, 1).replace("lm_head.", head))
        state.update(dict.fromkeys(extra, np.ones(2, np.float32)))

    edit_weights(directory, change)
    inner = json.loads((directory / "config.json").read_text())
    outer = {
        "architectures": inner.pop("architectures"),
        "model_type": "wrapper",
        "vision_config": {},
        "text_config": inner,
    }
    (directory / "config.json").write_text(json.dumps(outer))
    loaded = policy.load(directory)
    same_weights(plain, loaded)
    policy.save(loaded, directory / "out")
    assert "text_config" not in (directory / "out" / "config.json").read_text()
    same_weights(plain, policy.load(directory / "out"))
    edit_weights(directory, lambda state: state.pop(prefix + "norm.weight"))
    refused(directory, "missing tensor model.norm.weight")
    edit_weights(
        directory, lambda state: state.update({prefix + "norm.weight": np.ones(31, np.float32)})
    )
    refused(directory, f"{prefix}norm.weight has shape [31]")
    edit_weights(directory, lambda state: state.update({prefix + "odd": np.ones(31, np.float32)}))
    edit_weights(
        directory, lambda state: state.update({prefix + "norm.weight": np.ones(32, np.float32)})
    )
    refused(directory, f"unexpected tensors {prefix}odd")


def test_the_prediction_module_of_a_source_is_kept(directory, tmp_path):
    """Its own weights are copied. What it holds of embedding and head becomes that of the saved
    model; tables that follow from the configuration are left out."""
    layers = len(policy.load(directory).config.layers)
    module = f"model.layers.{layers}."
    copies = {
        f"{module}embed_tokens.weight": "model.embed_tokens.weight",
        f"{module}shared_head.head.weight": "lm_head.weight",
    }

    def add(state):
        state.update({name: state[of] for name, of in copies.items()})
        state[f"{module}eh_proj.weight"] = np.arange(4, dtype=np.int8)
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    edit_weights(directory, add)
    model = policy.load(directory)
    model.params = {path: array + 1 for path, array in model.params.items()}
    policy.save(model, tmp_path / "out", source=directory)
    saved = load_file(tmp_path / "out" / model_directory.SINGLE)
    assert not [name for name in saved if name.startswith(module) or "inv_freq" in name]
    extra = load_file(tmp_path / "out" / model_directory.MTP_FILE)
    assert extra.keys() == {*copies, f"{module}eh_proj.weight"}
    assert extra[f"{module}eh_proj.weight"].tolist() == [0, 1, 2, 3]
    for name, of in copies.items():
        np.testing.assert_array_equal(extra[name], saved[of])
    same_weights(model, policy.load(tmp_path / "out"))


def test_another_model_as_source_is_refused_before_anything_is_written(directory, tmp_path):
    model = policy.load(directory)
    policy.save(random_model(families.read(configuration("Qwen3"))), tmp_path / "other")
    with pytest.raises(ValueError, match="describes another model"):
        policy.save(model, tmp_path / "out", source=tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_an_export_names_no_python_files_and_one_dtype(directory, tmp_path):
    edit_config(
        directory,
        lambda config: config.update(
            {"auto_map": {"AutoConfig": "a.B"}, "torch_dtype": "bfloat16"}
        ),
    )
    policy.save(policy.load(directory), tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["dtype"] == "float32" and not {"auto_map", "torch_dtype"} & saved.keys()


def test_two_spellings_of_one_tensor_are_refused(directory):
    edit_weights(
        directory,
        lambda state: state.update({"language_model.model.norm.weight": np.ones(32, np.float32)}),
    )
    refused(directory, "language_model.model.norm.weight", "are both model.norm.weight")


def test_a_wrapper_reads_as_the_text_model_of_its_family(monkeypatch):
    llama = families.get("llama")
    monkeypatch.setattr(
        llama, "ARCHITECTURES", ("LlamaForCausalLM", "LlamaForConditionalGeneration")
    )
    inner = configuration("Llama") | {"model_type": "llama_text"}
    del inner["architectures"]
    outer = {
        "architectures": ["LlamaForConditionalGeneration"],
        "model_type": "llama_vl",
        "text_config": inner,
    }
    config = families.read(outer | {"tie_word_embeddings": True})
    assert config.tied_head and config.family == "llama"
    text = json.loads(config.hf)
    assert (
        text["architectures"] == ["LlamaForCausalLM"]
        and text["model_type"] == "llama"
        and text["tie_word_embeddings"]
    )
    assert families.read(text) == config


@pytest.mark.parametrize("wrapper", [True, False])
def test_the_tied_head_of_a_wrapper_goes_before_that_of_its_text_model(monkeypatch, wrapper):
    monkeypatch.setattr(
        families.get("llama"),
        "ARCHITECTURES",
        ("LlamaForCausalLM", "LlamaForConditionalGeneration"),
    )
    inner = configuration("Llama") | {"tie_word_embeddings": not wrapper}
    outer = {
        "architectures": ["LlamaForConditionalGeneration"],
        "model_type": "llama_vl",
        "text_config": inner,
    }
    config = families.read(outer | {"tie_word_embeddings": wrapper})
    assert config.tied_head is wrapper and json.loads(config.hf)["tie_word_embeddings"] is wrapper
    for says_nothing in (outer, outer | {"tie_word_embeddings": None}):
        assert families.read(says_nothing).tied_head is not wrapper


def test_the_text_model_is_the_one_of_its_type_where_a_family_has_several(monkeypatch):
    deepseek = families.get("deepseek")
    monkeypatch.setattr(
        deepseek, "ARCHITECTURES", (*deepseek.ARCHITECTURES, "DeepseekForConditionalGeneration")
    )
    inner = configuration("DeepseekV3")
    del inner["architectures"]
    for outer in (
        {"architectures": ["DeepseekForConditionalGeneration"]},
        {"model_type": "unknown"},
    ):
        text = json.loads(families.read(outer | {"text_config": inner}).hf)
        assert (
            text["architectures"] == ["DeepseekV3ForCausalLM"]
            and text["model_type"] == "deepseek_v3"
        )


def test_the_class_of_a_text_model_goes_before_its_type():
    inner = configuration("DeepseekV3") | {"model_type": "of_another_program"}
    text = json.loads(families.read({"model_type": "unknown", "text_config": inner}).hf)
    assert (
        text["architectures"] == ["DeepseekV3ForCausalLM"] and text["model_type"] == "deepseek_v3"
    )


GPT2_LIKE = (
    names.ATTENTION
    | names.MLP
    | names.joined(
        "mixer.", ("q_proj", "k_proj", "v_proj"), "attn.c_attn.weight", "e (h d)+ -> e h d"
    )
    | names.joined("mixer.", ("q_bias", "k_bias", "v_bias"), "attn.c_attn.bias", "(h d)+ -> h d")
    | names.joined("feed_forward.", ("gate_proj", "up_proj"), "mlp.gate_up.weight", "e f* -> e f")
    | {
        "Attention.o_proj": names.Stored("attn.c_proj.weight", "(h d) e -> h d e"),
        "mixer.o_proj": names.Stored("wrong"),
    }
)


@pytest.fixture
def gpt2_like(monkeypatch):
    """Llama, stored with another top, prefix and joined tensors."""
    llama = families.get("llama")
    monkeypatch.setattr(llama, "NAMES", GPT2_LIKE)
    top = {"embed_tokens": "wte.weight", "norm.weight": "ln_f.weight", "lm_head": "lm_head.weight"}
    monkeypatch.setattr(
        llama, "TOP", {path: names.Stored(name) for path, name in top.items()}, raising=False
    )
    monkeypatch.setattr(llama, "LAYER_PREFIX", "transformer.h.{n}.", raising=False)
    monkeypatch.setattr(llama, "PREFIXES", (("h.", "transformer.h."),), raising=False)
    return random_model(families.read(configuration("Llama", attention_bias=True)))


def test_a_family_stores_several_weights_in_one_tensor_and_has_a_top_of_its_own(
    gpt2_like, tmp_path
):
    policy.save(gpt2_like, tmp_path)
    state = load_file(tmp_path / model_directory.SINGLE)
    assert {name for name in state if ".h." not in name} == {
        "wte.weight",
        "ln_f.weight",
        "lm_head.weight",
    }
    layer = {
        name.removeprefix("transformer.h.2."): array
        for name, array in state.items()
        if ".h.2." in name
    }
    assert layer["attn.c_attn.weight"].shape == (32, 32 + 16 + 16) and layer[
        "attn.c_attn.bias"
    ].shape == (64,)
    ours = {
        path.removeprefix("stacks.0.layers.0."): array[2]
        for path, array in gpt2_like.params.items()
        if "stacks" in path
    }
    np.testing.assert_array_equal(
        layer["attn.c_attn.weight"][:, 32:48].reshape(32, 2, 8), ours["mixer.k_proj"]
    )
    np.testing.assert_array_equal(
        layer["mlp.gate_up.weight"][:, 1::2], ours["feed_forward.up_proj"]
    )
    np.testing.assert_array_equal(
        layer["attn.c_proj.weight"].reshape(4, 8, 32), ours["mixer.o_proj"]
    )
    same_weights(gpt2_like, policy.load(tmp_path))
    edit_weights(
        tmp_path, lambda state: renamed(state, lambda name: name.removeprefix("transformer."))
    )
    same_weights(gpt2_like, policy.load(tmp_path))


def test_layers_are_written_one_after_the_other(gpt2_like, tmp_path, monkeypatch):
    """Only one layer's weights are on the host at a time."""
    seen = []
    monkeypatch.setattr(
        model_directory,
        "_on_host",
        lambda array, number, real=model_directory._on_host: (
            seen.append(number) or real(array, number)
        ),
    )
    policy.save(gpt2_like, tmp_path)
    numbers = [n for n in seen if n is not None]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2}


def test_a_weight_that_no_table_names_is_an_error_of_the_family(monkeypatch, tmp_path):
    monkeypatch.setattr(families.get("llama"), "NAMES", names.MLP)
    with pytest.raises(LookupError, match="llama.py: no entry for input_layernorm.weight in NAMES"):
        policy.save(random_model(families.read(configuration("Llama"))), tmp_path)


def test_a_multimodal_configuration_of_no_family_is_named(directory):
    edit_config(
        directory,
        lambda config: config.update(
            {"architectures": ["OddVision"], "text_config": {"model_type": "odd"}}
        ),
    )
    edit_config(directory, lambda config: config.pop("model_type"))
    refused(directory, "OddVision", error=UnsupportedModel)


MODULES = {"multi_token_prediction": {"depth": 2}}


@pytest.mark.slow
def test_modules_that_a_directory_knows_nothing_of_start_fresh_and_are_saved(tmp_path):
    policy.save(random_model(families.read(configuration("Llama"))), tmp_path / "in")
    plain, model = (
        policy.load(tmp_path / "in"),
        policy.load(tmp_path / "in", sections=MODULES, seed=3),
    )
    assert (
        model.newly_initialized
        == {path for path in model.params if path.startswith("mtp.")}
        == model.params.keys() - plain.params.keys()
    )
    created = policy.create(model.config, 3)
    same_weights(
        created,
        policy.Model(
            model.graph,
            created.params | {path: model.params[path] for path in model.newly_initialized},
        ),
    )
    same_weights(
        plain, policy.Model(plain.graph, {path: model.params[path] for path in plain.params})
    )
    assert (np.asarray(model.params["mtp.enorm.weight"]) == 1).all() and np.asarray(
        model.params["mtp.eh_proj"]
    ).std() > 0.01
    policy.save(model, tmp_path / "out")
    for sections in (None, MODULES):
        back = policy.load(tmp_path / "out", sections=sections, seed=4)
        same_weights(model, back)
        assert (
            back.config.multi_token_prediction == model.config.multi_token_prediction
            and not back.newly_initialized
        )


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"]
)
def test_modules_that_are_announced_and_not_there_are_missing(directory, key):
    edit_config(directory, lambda config: config.update({key: 1}))
    with pytest.raises(ModelFileError, match=r"missing tensor model\.layers\.3\.") as caught:
        policy.load(directory, sections=MODULES)
    for words in (
        "depth 2",
        "hold 0;",
        f"config.json says {key}: 1",
        "multi_token_prediction: {depth: 2, missing: fresh}",
    ):
        assert words in str(caught.value), caught.value
    edit_config(directory, lambda config: config.update({key: 0}))
    assert policy.load(directory, sections=MODULES).newly_initialized


def test_a_part_of_a_module_is_no_module(directory):
    edit_weights(
        directory,
        lambda state: state.update({"model.layers.4.enorm.weight": np.ones(32, np.float32)}),
    )
    with pytest.raises(ModelFileError, match=r"missing tensor model\.layers\.3\."):
        policy.load(directory, sections=MODULES)
    with pytest.raises(ModelFileError, match=r"missing tensor model\.layers\.4\."):
        policy.load(directory, sections=MODULES, missing="fresh")


@pytest.mark.parametrize("held", [0, 1])
def test_missing_modules_start_fresh_where_the_caller_says_so(tmp_path, held):
    """In addition to those that the files hold, and where config.json announces one that they
    lack."""
    keys = {"num_hidden_layers": 1} | (
        {"duet": {"multi_token_prediction": {"depth": held}}} if held else {}
    )
    policy.save(random_model(families.read(configuration("Llama", **keys))), tmp_path)
    edit_config(tmp_path, lambda config: config.update({"num_nextn_predict_layers": 1}))
    plain = policy.load(tmp_path)
    with pytest.raises(
        ModelFileError, match=rf"model\.layers\.{1 + held}\..* hold {held}[ ;].*missing: fresh"
    ):
        policy.load(tmp_path, sections=MODULES)
    model = policy.load(tmp_path, sections=MODULES, seed=3, missing="fresh")
    assert model.newly_initialized == {path for path in model.params if path.startswith("mtp.")}
    for path, created in model.graph.init(3, model.newly_initialized).items():
        np.testing.assert_array_equal(
            np.asarray(model.params[path])[held:], np.asarray(created)[held:], err_msg=path
        )
    for path, read in plain.params.items():
        result = np.asarray(model.params[path])
        np.testing.assert_array_equal(
            result[:held] if path in model.newly_initialized else result,
            np.asarray(read),
            err_msg=path,
        )
    policy.save(model, tmp_path / "out")
    back = policy.load(tmp_path / "out")
    same_weights(model, back)
    assert not back.newly_initialized


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": None, "compress_ratios": [0, 4, 2, 128]},
            "compress_ratios: 2; known: 0, 4, 128",
        ),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: full_attention"),
        (
            {"mlp_layer_types": ["moe", "moe", "dense", "moe"]},
            "mlp_layer_types: dense; expected hash_moe or moe",
        ),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types: 3 entries"),
        ({"o_groups": 3}, "o_groups: 3 does not divide num_attention_heads times head_dim, 64"),
        ({"swiglu_limit": 0.0}, "swiglu_limit 0.0: expected a positive number"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_values_that_deepseek_v4_does_not_have_are_refused_by_key(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.read(configuration("DeepseekV4", **change))
