"""Logits equal those of transformers, over the switches of every family."""

import numpy as np
import pytest
from oracles import STANDARD, edit_config, oracle, reference_logits, saved, tokens

import policy

pytest.importorskip("torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'")

TOLERANCE = 2e-5
_THETA = {"rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0} | _THETA
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8} | _THETA

STANDARD_CASES = {kind: (kind, keys) for kind, keys in STANDARD.items()}
# Shapes and switches that the standard models leave at one value.
VARIANTS = {
    "llama-mha-tied-mlp_bias-linear-gelu": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "rope_parameters": LINEAR,
            "hidden_act": "gelu",
        },
    ),
    "llama-mqa-one_layer": ("Llama", {"num_key_value_heads": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-2}),
    "qwen3-sliding-biases": (
        "Qwen3",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "attention_bias": True,
        },
    ),
    "qwen3-layer_types-yarn": (
        "Qwen3",
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "qwen3_moe-sparse_step-unnormalised": (
        "Qwen3Moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "attention_bias": True, "rope_parameters": LINEAR},
    ),
    "qwen3_moe-all_moe-window-tied": (
        "Qwen3Moe",
        {"use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True, "norm_topk_prob": True},
    ),
    "v2-greedy-full_query": (
        "DeepseekV2",
        {"topk_method": "greedy", "q_lora_rank": None, "n_group": None, "topk_group": None, "mlp_bias": True},
    ),
    "v2-yarn-mscales-tied": (
        "DeepseekV2",
        {
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "v3-one_group-unnormalised-two_shared": (
        "DeepseekV3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "v3-all_moe-halves-linear-no_shared": (
        "DeepseekV3",
        {
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "rope_parameters": LINEAR | {"mscale_all_dim": 1.0},
            "n_shared_experts": 0,
        },
    ),
}
# More of them, too many for every run.
WIDE = {
    "v3-yarn-mscale-differs": (
        "DeepseekV3",
        {"num_hidden_layers": 5, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "v3-all_dense": ("DeepseekV3", {"first_k_dense_replace": 3}),
    "qwen3_moe-all_dense": ("Qwen3Moe", {"mlp_only_layers": [0, 1, 2]}),
    "llama-yarn-attention_factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 4}}),
    "llama-yarn-plain": ("Llama", {"rope_parameters": YARN}),
    "llama-head_dim-larger": ("Llama", {"head_dim": 24, "num_hidden_layers": 2}),
    "llama-seven_layers-relu": ("Llama", {"num_hidden_layers": 7, "hidden_act": "relu"}),
    "llama-gelu_new": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3-mha-untied-linear": ("Qwen3", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "qwen3-mqa-window-larger-than-row": (
        "Qwen3",
        {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
    ),
    "qwen3_moe-prefix-dense": ("Qwen3Moe", {"mlp_only_layers": [0], "num_hidden_layers": 6}),
    "qwen3_moe-one_expert": ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "qwen3_moe-all_experts": ("Qwen3Moe", {"num_experts_per_tok": 8}),
    "v2-no_shared-three_groups": (
        "DeepseekV2",
        {
            "n_shared_experts": 0,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
        },
    ),
    "v2-all_moe-yarn-attention_factor": (
        "DeepseekV2",
        {"first_k_dense_replace": 0, "rope_parameters": YARN | {"attention_factor": 0.8, "mscale_all_dim": 0.707}},
    ),
    "v3-yarn-attention_factor": (
        "DeepseekV3",
        {"rope_parameters": YARN | {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v3-two_dense-two_groups-eight_chosen": (
        "DeepseekV3",
        {"first_k_dense_replace": 2, "num_hidden_layers": 6, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 8},
    ),
}


def check(kind, keys, directory, lengths):
    model = oracle(kind, **keys)
    ours = policy.load(saved(model, directory))
    for length in lengths:
        row = tokens(2, length)
        expected = reference_logits(model, row)
        assert expected.std() > 0.5, "the oracle says the same everywhere"
        np.testing.assert_allclose(np.asarray(ours.logits(row)), expected, atol=TOLERANCE, rtol=0)


# 12 tokens are the first of 70, since nothing looks ahead; the slow table compiles for both lengths all the same.
@pytest.mark.parametrize("name", STANDARD_CASES | VARIANTS)
def test_logits(name, tmp_path):
    check(*(STANDARD_CASES | VARIANTS)[name], tmp_path, (70,))


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDARD_CASES | VARIANTS | WIDE)
def test_logits_at_both_lengths(name, tmp_path):
    check(*(STANDARD_CASES | VARIANTS | WIDE)[name], tmp_path, (12, 70))


def old_rope(config):
    """rope_theta and rope_scaling with `type`, as files from before transformers 5 have it."""
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    kind = settings.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else settings | {"type": kind}


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_the_old_spelling_of_rope_is_the_same_model(kind, tmp_path):
    keys = STANDARD[kind] | {"rope_parameters": STANDARD[kind]["rope_parameters"] | {"rope_theta": 5000.0}}
    new = policy.load(saved(oracle(kind, **keys), tmp_path)).config
    edit_config(tmp_path, old_rope)
    old = policy.load(tmp_path).config
    assert old.stacks == new.stacks
    assert new.layers[0].mixer.rope.theta == 5000.0


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV2", "DeepseekV3"])
def test_every_name_of_the_number_of_experts_is_read(kind, name, tmp_path):
    directory = saved(oracle(kind, num_hidden_layers=2), tmp_path)

    def rename(config):
        found = [config.pop(k) for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in config]
        config[name] = found[0]

    edit_config(directory, rename)
    assert policy.load(directory).config.layers[1].feed_forward.router.experts == 8


def test_bfloat16_files_are_read_as_float32(tmp_path):
    import torch
    from transformers import DeepseekV3ForCausalLM

    directory = saved(oracle("DeepseekV3").to(torch.bfloat16), tmp_path)
    ours = policy.load(directory, dtype="float32")
    assert {str(array.dtype) for array in ours.params.values()} == {"float32"}
    row = tokens(2, 12)
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    expected = reference_logits(model, row)
    np.testing.assert_allclose(np.asarray(ours.logits(row)), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_compute_is_close_and_keeps_the_correction_bias_in_float32(tmp_path):
    model = oracle("DeepseekV3")
    ours = policy.load(saved(model, tmp_path), dtype="bfloat16")
    kept = {path for path, array in ours.params.items() if str(array.dtype) == "float32"}
    assert kept == ours.graph.untrained and kept
    row = tokens(2, 12)
    found, expected = np.asarray(ours.logits(row)), reference_logits(model, row)
    assert found.dtype == np.float32
    # Rows whose choice of experts flips at low precision are far off; most rows are not.
    assert np.median(np.abs(found - expected)) < 0.05
