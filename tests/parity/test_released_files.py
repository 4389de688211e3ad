"""Model directories in the forms in which they are released: quantised, in older spellings, inside
a multimodal model.
"""

import copy
import json

import numpy as np
import pytest
from oracles import (
    KINDS,
    STANDARD,
    TINY,
    classes,
    configuration,
    edit_config,
    oracle,
    reference_logits,
    reload,
    saved,
    tokens,
)

import policy
from policy import families
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import model_directory

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


def assert_same_weights(actual, expected):
    assert actual.params.keys() == expected.params.keys()
    for path, array in expected.params.items():
        np.testing.assert_array_equal(
            np.asarray(actual.params[path]), np.asarray(array), err_msg=path
        )


def stored_names(directory):
    from safetensors import safe_open

    with safe_open(directory / model_directory.SINGLE, framework="numpy") as file:
        return list(file.keys())


def assert_same_logits(directory, theirs):
    row = tokens(2, 12)
    np.testing.assert_allclose(
        np.asarray(policy.load(directory).logits(row)),
        reference_logits(theirs, row),
        atol=2e-5,
        rtol=0,
    )


def old_rope(config):
    """`rope_theta` and `rope_scaling`, as files from before transformers 5 have it."""
    settings = config.pop("rope_parameters")
    config |= {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}


def test_experts_in_mxfp4_are_read_as_their_dequantised_twin(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = oracle("GptOss", **STANDARD["GptOss"], intermediate_size=64)
    generator, packed = torch.Generator().manual_seed(0), {}
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                N, inputs, outputs = weight.shape
                blocks = torch.randint(
                    256, (N, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
                )
                scales = torch.randint(
                    121, 125, (N, outputs, inputs // 32), generator=generator, dtype=torch.uint8
                )
                packed[name] = blocks, scales
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    twin, directory = saved(theirs, tmp_path / "twin"), saved(theirs, tmp_path / "mxfp4")
    state = load_file(directory / "model.safetensors")
    for name, (blocks, scales) in packed.items():
        del state[name]
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})

    def released(config):
        old_rope(config)
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        }

    edit_config(directory, released)
    assert len(packed) == 4
    assert_same_weights(policy.load(directory), policy.load(twin))
    assert_same_logits(directory, theirs)
    policy.save(policy.load(directory), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_same_weights(policy.load(tmp_path / "out"), policy.load(twin))


def llama4_with_vision(keys):
    import transformers

    text = TINY["Llama4"] | keys
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=159
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return transformers.Llama4ForConditionalGeneration(config).float().eval()


@pytest.mark.slow
def test_the_text_model_of_a_multimodal_llama4_is_read_alone(tmp_path):
    theirs = llama4_with_vision(STANDARD["Llama4"])
    directory = saved(theirs, tmp_path / "in")
    stored = json.loads((directory / "config.json").read_text())
    assert (
        stored["architectures"] == ["Llama4ForConditionalGeneration"]
        and stored["model_type"] == "llama4"
    )
    assert_same_logits(directory, theirs.language_model)
    policy.save(policy.load(directory), tmp_path / "out")
    assert (
        type(theirs.language_model).from_pretrained(tmp_path / "out").config.model_type
        == "llama4_text"
    )
    assert_same_logits(tmp_path / "out", theirs.language_model)


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Mistral", "Mistral4")]


@pytest.mark.parametrize("kind", ["Ministral3", *OTHERS])
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_mistral3_directory_is_read_alone(kind, tied, tmp_path):
    """Mistral Small 3 and 4, Magistral, Devstral and Ministral 3: the wrapper says whether the head
    is tied."""

    import transformers

    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    text = classes(kind)[0](**copy.deepcopy(TINY[kind] | STANDARD[kind]))
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=transformers.PixtralVisionConfig(**vision),
        image_token_index=159,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    directory = saved(theirs, tmp_path / "in")
    assert any("vision_tower" in name for name in stored_names(directory))
    ours = policy.load(directory)
    assert ours.config.tied_head is tied
    assert_same_logits(directory, theirs)
    policy.save(ours, tmp_path / "out")
    row = tokens(2, 12)
    result = reference_logits(reload(kind, tmp_path / "out"), row)
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=2e-5, rtol=0)


def test_the_text_model_of_gemma4_unified_is_read_alone(tmp_path):
    """Gemma 4 12B embeds pictures and sounds without towers; a text model has no use for these
    weights."""

    import transformers

    keys = TINY["Gemma4Unified"] | STANDARD["Gemma4Unified"] | {"pad_token_id": 0}
    text = transformers.Gemma4UnifiedTextConfig(**copy.deepcopy(keys))
    vision = {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
    config = transformers.Gemma4UnifiedConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.Gemma4UnifiedForConditionalGeneration(config).float().eval()
    directory = saved(theirs, tmp_path / "in")
    assert any("vision_embedder" in name for name in stored_names(directory))
    row = tokens(2, 12)
    ours = policy.load(directory)
    np.testing.assert_allclose(ours.logits(row), reference_logits(theirs, row), atol=1e-4, rtol=0)
    policy.save(ours, tmp_path / "out")
    result = reference_logits(reload("Gemma4Unified", tmp_path / "out"), row)
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind",
    ["Qwen3_5", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Qwen3_5Moe", "Qwen4Exp"))],
)
def test_the_text_model_of_a_multimodal_qwen_is_read_alone(kind, tmp_path):
    import transformers

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    text = copy.deepcopy(TINY[kind] | STANDARD[kind])
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    directory = saved(theirs, tmp_path / "in")
    names = stored_names(directory)
    assert any(name.startswith("model.language_model.") for name in names) and any(
        "visual" in name for name in names
    )
    row = tokens(2, 12)
    expected = reference_logits(theirs, row)
    np.testing.assert_allclose(
        np.asarray(policy.load(directory).logits(row)), expected, atol=1e-4, rtol=0
    )
    policy.save(policy.load(directory), tmp_path / "out")
    assert not any(
        "visual" in name or "language_model" in name for name in stored_names(tmp_path / "out")
    )
    np.testing.assert_allclose(
        reference_logits(reload(kind, tmp_path / "out"), row), expected, atol=1e-4, rtol=0
    )
    policy.save(policy.load(directory), tmp_path / "complete", source=directory)
    tables = [name for name in names if ".ple." in name]
    assert bool(tables) == (kind == "Qwen4Exp") and set(tables) <= set(
        stored_names(tmp_path / "complete")
    )
    again, info = type(theirs).from_pretrained(
        tmp_path / "complete", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(
            again.state_dict()[name].numpy(), tensor.numpy(), err_msg=name
        )


def kimi_k25():
    """A model of pictures and text with the layers of DeepSeek V3."""

    import transformers

    text = copy.deepcopy(TINY["DeepseekV3"] | STANDARD["DeepseekV3"]) | {
        "model_type": "deepseek_v3"
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return transformers.Kimi_K25ForConditionalGeneration(config).float().eval()


def kimi_config(config):
    """The configuration of a Kimi K2.5 directory as it is released."""
    inner = config["text_config"]
    old_rope(inner)
    inner |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    config["architectures"] = ["KimiK25ForConditionalGeneration"]


def without_classes(config):
    kimi_config(config)
    config["text_config"]["architectures"] = None


@pytest.mark.parametrize("form", ["transformers", "released", "released without classes"])
def test_the_text_model_of_a_kimi_k25_directory_is_deepseek_v3(form, tmp_path):
    from safetensors.numpy import load_file, save_file

    theirs = kimi_k25()
    directory = saved(theirs, tmp_path / "in")
    assert any("mm_projector" in name for name in stored_names(directory))
    if form != "transformers":
        edit_config(directory, kimi_config if form == "released" else without_classes)
        file = directory / model_directory.SINGLE
        save_file(
            {
                name.replace("model.blocks.", "model.layers."): a
                for name, a in load_file(file).items()
            },
            file,
        )
    assert_same_logits(directory, theirs)
    policy.save(policy.load(directory), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        written["architectures"] == ["DeepseekV3ForCausalLM"]
        and written["model_type"] == "deepseek_v3"
    )
    row = tokens(2, 12)
    result = reference_logits(reload("DeepseekV3", tmp_path / "out"), row)
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=2e-5, rtol=0)


@pytest.mark.parametrize("names", [["DeepseekV3ForCausalLM"], None])
def test_a_kimi_k2_directory_is_deepseek_v3(names, tmp_path):
    theirs = oracle("DeepseekV3")
    directory = saved(theirs, tmp_path / "in")
    edit_config(
        directory, lambda config: config.update({"architectures": names, "model_type": "kimi_k2"})
    )
    assert_same_logits(directory, theirs)
    policy.save(policy.load(directory), tmp_path / "out")
    row = tokens(2, 12)
    result = reference_logits(reload("DeepseekV3", tmp_path / "out"), row)
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=2e-5, rtol=0)


@pytest.mark.parametrize("scaling", ["yarn", "default"])
def test_the_old_spelling_of_rope_scales_only_the_full_attention_of_olmo3(scaling, tmp_path):
    """Both for us and for transformers, which reads the directory again after the change."""
    directory = saved(oracle("Olmo3", **STANDARD["Olmo3"]), tmp_path)

    def old(config):
        settings = config["rope_parameters"]["full_attention"]
        config["rope_parameters"] = settings if scaling == "yarn" else {"rope_theta": 30000.0}
        old_rope(config)

    edit_config(directory, old)
    theirs = type(oracle("Olmo3")).from_pretrained(directory, attn_implementation="eager").eval()
    assert_same_logits(directory, theirs)
    layers = policy.load(directory).config.layers
    assert layers[0].mixer.rope.scaling is None and layers[0].mixer.rope != layers[3].mixer.rope


def test_settings_of_rope_that_transformers_would_drop_are_refused():
    flat = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}
    hf = TINY["Olmo3"] | {"model_type": "olmo3", "rope_parameters": flat}
    with pytest.raises(
        UnsupportedModel,
        match="rope_parameters: expected settings for each of sliding_attention, full_attention",
    ):
        families.read(hf)


def test_too_few_entries_about_rotary_layers_are_refused():
    with pytest.raises(UnsupportedModel, match="no_rope_layers: 2 entries for 4 layers"):
        families.read(TINY["Llama4"] | {"model_type": "llama4_text", "no_rope_layers": [1, 0]})


def test_layers_of_mistral_that_differ_are_refused():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(
        UnsupportedModel,
        match="layer_types: full_attention; known: sliding_attention, one for each layer",
    ):
        families.read(TINY["Mistral"] | {"model_type": "mistral", "layer_types": kinds})


def test_the_kinds_of_layers_of_granite_4_have_older_names(tmp_path):
    directory = saved(
        oracle("GraniteMoeHybrid", num_local_experts=0, mamba_d_head="auto"), tmp_path
    )

    def released(config):
        del config["layer_types"]
        config |= {
            "layers_block_type": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        }
        config |= {"mamba_d_head": "auto", "time_step_limit": None}

    edit_config(directory, released)
    layers = policy.load(directory).config.layers
    assert [type(layer.mixer).__name__ for layer in layers] == ["Mamba2", "Attention", "Mamba2"]
    edit_config(directory, lambda config: config.pop("time_step_limit"))
    theirs = (
        type(oracle("GraniteMoeHybrid"))
        .from_pretrained(directory, attn_implementation="eager")
        .eval()
    )
    assert_same_logits(directory, theirs)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"indexer_n_heads": None, "indexer_budget": None},
            "indexer_n_heads, indexer_budget: absent",
        ),
        (
            {"indexer_kv_heads": 2},
            "indexer_kv_heads: 2, and the indexer has one key for each token",
        ),
        (
            {"indexer_budget": 7},
            "indexer_budget: 7 tokens are not a number of blocks of indexer_compress_ratio, 3",
        ),
        (
            {"indexer_head_dim": 2},
            "indexer_head_dim: 2 numbers, of which the 4 that rotate in attention rotate",
        ),
        ({"indexer_compress_ratio": 0}, "indexer_compress_ratio: 0 must be at least 1"),
        (
            {"output_gate_type": "swish"},
            "output_gate_type 'swish' is not supported; known: silu, sigmoid",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported by this family, only 'silu'"),
        ({"hc_count": 1}, "hc_count: 1, and this family has at least 2 residual streams"),
        (
            {"ple_layer_ids": [1]},
            r"eos_token_id: per-layer embeddings \(ple_layer_ids\) need the token",
        ),
        (
            {"ple_layer_ids": [5], "eos_token_id": 7},
            "ple_layer_ids: 5 is none of the layers 1 to 4",
        ),
        ({"duet": {"hyper_connections": {}}}, "this model has residual streams of its own"),
    ],
)
def test_what_no_class_of_qwen4_exp_computes_is_refused(keys, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.read(configuration("Qwen4Exp", **keys))


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("GraniteMoeHybrid", {"mamba_d_head": 6}, "6 heads of 6 are not the 48 channels"),
        (
            "GraniteMoeHybrid",
            {"hidden_act": "gelu"},
            "hidden_act 'gelu' is not supported in layers of Mamba-2",
        ),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["mamba", "rwkv", "mamba"]},
            "layer_types: rwkv; known: linear_attention",
        ),
        ("FalconH1", {"mamba_d_ssm": None}, "6 heads of 8 are not the 64 channels"),
        (
            "FalconH1",
            {"hidden_act": "gelu"},
            "hidden_act 'gelu' is not supported in layers of Mamba-2",
        ),
        ("FalconH1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers: 2 factors, expected 5"),
    ],
)
def test_layers_of_mamba_2_that_no_class_computes_are_refused(kind, keys, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.read(configuration(kind, **keys))


def of_8_bits(weight):
    """(values, scales) of 8-bit floats, whose scales are powers of two."""
    blocks = [-(-n // 128) for n in weight.shape]
    scales = torch.full(blocks, 125, dtype=torch.uint8)
    return (weight * 4).to(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def of_4_bits(weight, generator):
    """(values, scales) of random 4-bit floats, two in a byte, in the place of a weight."""
    rows, columns = weight.shape
    values = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
    scales = torch.randint(
        122, 125, (rows, -(-columns // 32)), generator=generator, dtype=torch.uint8
    )
    return values, scales.view(torch.float8_e8m0fnu)


def test_files_of_deepseek_v4_are_read_as_transformers_reads_them(tmp_path):
    """Names without `model.`, projections of 8 bits, experts of 4 bits, a module that predicts
    further tokens."""
    import re

    from safetensors.torch import load_file, save_file
    from transformers import FineGrainedFP8Config

    directory = saved(oracle("DeepseekV4", **STANDARD["DeepseekV4"]), tmp_path / "released")
    generator, state = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(directory / model_directory.SINGLE).items():
        name = (
            name.removeprefix("model.")
            .replace("embed_tokens.", "embed.")
            .replace("hc_head.hc_", "hc_head_")
        )
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        if ".ffn.experts." in name:
            state[name], state[name.replace(".weight", ".scale")] = of_4_bits(weight, generator)
        elif re.search(r"\.attn\.w\w+\.weight|\.shared_experts\.", name):
            state[name], state[name.replace(".weight", ".scale")] = of_8_bits(weight)
        else:
            state[name] = weight
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    assert dtypes == {"float32", "float8_e4m3fn", "float8_e8m0fnu", "int8", "int64"}
    state["mtp.0.e_proj.weight"], state["mtp.0.e_proj.scale"] = of_8_bits(torch.eye(3))
    state["mtp.0.ffn.experts.0.w1.weight"], state["mtp.0.ffn.experts.0.w1.scale"] = of_4_bits(
        torch.eye(4), generator
    )
    save_file(state, directory / model_directory.SINGLE, metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    edit_config(
        directory,
        lambda config: config.update(expert_dtype="fp4", quantization_config=quantization),
    )
    theirs = reload(
        "DeepseekV4",
        directory,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        experts_implementation="eager",
    )
    assert_same_logits(directory, theirs)
    policy.save(policy.load(directory), tmp_path / "out")
    assert_same_weights(policy.load(tmp_path / "out"), policy.load(directory))
    assert not any(name.startswith("model.") for name in stored_names(tmp_path / "out"))
    reload("DeepseekV4", tmp_path / "out")

    policy.save(policy.load(directory), tmp_path / "complete", source=directory)
    copied = load_file(tmp_path / "complete" / model_directory.SINGLE)
    assert {name for name in copied if name.startswith("mtp.")} == {
        "mtp.0.e_proj.weight",
        "mtp.0.ffn.experts.0.w1.weight",
    }
    assert torch.equal(copied["mtp.0.e_proj.weight"], torch.eye(3)) and not any(
        "scale_inv" in name for name in copied
    )
    reload("DeepseekV4", tmp_path / "complete")


def test_a_head_of_deepseek_v4_is_accepted_where_it_is_tied(tmp_path):
    from safetensors.torch import load_file, save_file

    directory = saved(
        oracle("DeepseekV4", tie_word_embeddings=True, **KINDS["DeepseekV4"].short), tmp_path
    )
    state = load_file(directory / model_directory.SINGLE)
    expected = policy.load(directory)
    for name in ("lm_head.weight", "head.weight"):
        head = {name: state["model.embed_tokens.weight"].clone()}
        save_file(state | head, directory / model_directory.SINGLE, metadata={"format": "pt"})
        assert_same_weights(policy.load(directory), expected)
