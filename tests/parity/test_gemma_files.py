"""Gemma in the forms in which it is released: inside a multimodal model, and in the older spellings
of its configuration.
"""

import json

import numpy as np
import pytest
from oracles import KINDS, STANDARD, TINY, edit_config, oracle, reference_logits, saved, tokens

import policy
from policy import families
from policy.fields.config_fields import UnsupportedModel
from policy.huggingface import sources

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def multimodal(kind, keys):
    """(the model with a vision tower around the text model of `kind`, that text model with its
    head)."""
    import transformers

    family = kind.removesuffix("Moe").removesuffix("Small")
    vision = _VISION | (
        {"image_size": 28, "patch_size": 14}
        if family == "Gemma3"
        else {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 16,
        }
    )
    text = oracle(kind, **keys)
    config_class, model_class = (
        getattr(transformers, family + end) for end in ("Config", "ForConditionalGeneration")
    )
    config = config_class(
        text_config=text.config.to_dict(), vision_config=vision, image_token_id=159
    )
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    return model, text


# Gemma 3 with a vision tower computes no cap on logits in transformers; Gemma 4 puts the padding
# token where images go.
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("Gemma3", {"final_logit_softcapping": None}),
        ("Gemma4", {"pad_token_id": 0}),
        pytest.param("Gemma4Moe", {"pad_token_id": 0}, marks=pytest.mark.slow),
        ("Gemma4Small", {"pad_token_id": 0} | KINDS["Gemma4Small"].short),
    ],
)
def test_the_text_model_of_a_multimodal_one_is_read_alone(kind, keys, tmp_path):
    full, text = multimodal(kind, STANDARD[kind] | keys)
    directory = saved(full, tmp_path / "in")
    stored = json.loads((directory / "config.json").read_text())
    assert stored["architectures"] == [type(full).__name__] and "text_config" in stored
    ours = policy.load(directory)
    row = tokens(2, 12)
    result = np.asarray(ours.logits(row))
    np.testing.assert_allclose(result, reference_logits(text, row), atol=KINDS[kind].logits, rtol=0)
    np.testing.assert_allclose(result, reference_logits(full, row), atol=KINDS[kind].logits, rtol=0)
    policy.save(ours, tmp_path / "out")
    back, info = type(text).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    weights = back.state_dict()
    for name, tensor in text.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def assert_same_logits(directory, row):
    """Ours and theirs, which read the directory again after a change of its config.json, agree;
    returns their logits.
    """
    kind = "Gemma4" if "gemma4" in (directory / "config.json").read_text() else "Gemma3"
    theirs = (
        type(oracle(kind, **KINDS[kind].short))
        .from_pretrained(directory, attn_implementation="eager")
        .eval()
    )
    expected = reference_logits(theirs, row)
    np.testing.assert_allclose(
        np.asarray(policy.load(directory).logits(row)), expected, atol=KINDS[kind].logits, rtol=0
    )
    return expected


@pytest.mark.slow
def test_the_old_keys_of_gemma3_scale_and_space_its_full_layers(tmp_path):
    theirs, row = oracle("Gemma3", num_hidden_layers=5, sliding_window_pattern=2), tokens(2, 12)
    directory = saved(theirs, tmp_path)

    def old(config):
        settings = config.pop("rope_parameters")
        scaling = dict(settings["full_attention"])
        config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        config["rope_local_base_freq"] = settings["sliding_attention"]["rope_theta"]
        del config["layer_types"]
        config["sliding_window_pattern"] = 2

    edit_config(directory, old)
    np.testing.assert_allclose(
        assert_same_logits(directory, row), reference_logits(theirs, row), atol=1e-6, rtol=0
    )
    first, second, *_ = policy.load(directory).config.layers
    assert (first.mixer.window, second.mixer.window) == (4, None)
    assert first.mixer.rope.scaling is None and second.mixer.rope.scaling.factor == 4.0


@pytest.mark.parametrize(
    "keys", [["rope_scaling"], ["rope_theta", "rope_local_base_freq"], []], ids=str
)
def test_old_keys_of_gemma3_that_are_absent_mean_what_they_mean_to_transformers(keys, tmp_path):
    directory = saved(oracle("Gemma3", **KINDS["Gemma3"].short), tmp_path)
    values = {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 500.0,
        "rope_local_base_freq": 50.0,
    }

    def old(config):
        del config["rope_parameters"]
        config |= {key: values[key] for key in keys}

    edit_config(directory, old)
    assert_same_logits(directory, tokens(2, 12))


def test_a_released_gemma3_says_little_and_means_the_defaults_of_the_class():
    """The text_config of the 4B model, of which everything else is the default of transformers."""
    said = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    said |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    wrapper = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": said,
    }
    result, preset = families.read(wrapper), sources.preset("gemma3-4b")
    assert (result.stacks, result.vocab_size, result.norm) == (
        preset.stacks,
        preset.vocab_size,
        preset.norm,
    )
    assert result.tied_head and result.family == "gemma3"


@pytest.mark.parametrize("k_is_v", [True, False])
def test_both_spellings_of_the_head_shapes_of_gemma4_are_read(k_is_v, tmp_path):
    """Transformers writes per_layer_config, the released files have two keys for all full
    layers."""
    keys = KINDS["Gemma4"].short | {"attention_k_eq_v": k_is_v, "num_global_key_value_heads": 1}
    directory, row = saved(oracle("Gemma4", **keys), tmp_path), tokens(2, 12)
    new = policy.load(directory)

    def old(config):
        assert "1" in config.pop("per_layer_config")
        assert "global_head_dim" not in config and "num_global_key_value_heads" not in config
        config |= {
            "global_head_dim": TINY["Gemma4"]["global_head_dim"],
            "num_global_key_value_heads": 1,
        }

    edit_config(directory, old)
    assert policy.load(directory).config.stacks == new.config.stacks
    assert new.config.layers[1].mixer.kv_heads == (1 if k_is_v else 2)
    np.testing.assert_array_equal(
        np.asarray(policy.load(directory).logits(row)), np.asarray(new.logits(row))
    )
    assert_same_logits(directory, row)


REFUSED = {
    "vocab_size_per_layer_input 159: it must be at least": (
        "Gemma4Small",
        {"vocab_size_per_layer_input": 159},
    ),
    "num_kv_shared_layers 8: it must be from 0 to 7": ("Gemma4Small", {"num_kv_shared_layers": 8}),
    "num_kv_shared_layers 5: no full_attention layer comes": (
        "Gemma4Small",
        {"num_kv_shared_layers": 5},
    ),
    "layer 7 cannot share keys and values of another shape: 2 heads of 4 and 1 heads of 8": (
        "Gemma4Small",
        {"per_layer_config": {"7": {"head_dim": 8, "num_key_value_heads": 1}}},
    ),
    "use_bidirectional_attention 'all'": ("Gemma4", {"use_bidirectional_attention": "all"}),
    "per_layer_config.1: intermediate_size": (
        "Gemma4",
        {"per_layer_config": {"1": {"intermediate_size": 8}}},
    ),
    "per_layer_config.6: there are 6 layers": (
        "Gemma4",
        {"per_layer_config": {"6": {"head_dim": 8}}},
    ),
    "rope_parameters: expected settings for sliding_attention": (
        "Gemma4",
        {"rope_parameters": {"rope_theta": 5.0}},
    ),
    "rope_parameters: expected settings for full_attention": (
        "Gemma3",
        {"rope_parameters": {"rope_theta": 5.0}},
    ),
    "rope_scaling lacks rope_type": ("Gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    "layer_types: 1 entries for 6 layers": ("Gemma3", {"layer_types": ["full_attention"]}),
    "layer_types: chunked_attention": ("Gemma2", {"layer_types": ["chunked_attention"] * 4}),
    "gemma3: use_bidirectional_attention": ("Gemma3", {"use_bidirectional_attention": True}),
    "gemma2: use_bidirectional_attention": ("Gemma2", {"use_bidirectional_attention": True}),
    "gemma: use_bidirectional_attention": ("Gemma", {"use_bidirectional_attention": True}),
    "enable_moe_block needs num_experts, top_k_experts, moe": (
        "Gemma4",
        {"enable_moe_block": True, "num_experts": None},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_decoder_does_not_compute_is_refused_by_name(message):
    kind, keys = REFUSED[message]
    hf = TINY[kind] | {"model_type": KINDS[kind].model_type}
    families.read(hf)
    with pytest.raises(UnsupportedModel, match=message):
        families.read(hf | keys)


def test_keys_of_gemma4_without_effect_here_are_accepted():
    hf = TINY["Gemma4"] | {"model_type": "gemma4_text"}
    same = {"use_double_wide_mlp": True, "vocab_size_per_layer_input": 7}
    assert families.read(hf | same).stacks == families.read(hf).stacks
    mixers = [
        spec.mixer for spec in families.read(hf | {"use_bidirectional_attention": "vision"}).layers
    ]
    # Only the sliding layers look ahead, within a picture.
    assert [mixer.looks_ahead for mixer in mixers] == [mixer.window is not None for mixer in mixers]
    assert not any(spec.mixer.looks_ahead for spec in families.read(hf).layers)
