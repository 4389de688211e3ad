"""Logits equal those of transformers, over the switches of every family."""

import numpy as np
import pytest
import tiny
from oracles import KINDS, STANDARD, by_kind, edit_config, oracle, reference_logits, saved, tokens

import policy

pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


def check(kind, ours, expected):
    assert expected.std() > 0.5, "the oracle says the same everywhere"
    np.testing.assert_allclose(
        np.asarray(ours.logits(tokens(2, 70))), expected, atol=KINDS[kind].logits, rtol=0
    )


@pytest.mark.parametrize("kind", by_kind())
def test_logits(kind, pair):
    check(kind, pair(kind).ours, pair(kind).expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.VARIANTS | tiny.WIDE)
def test_logits_of_variants(name, tmp_path):
    kind, keys = (tiny.VARIANTS | tiny.WIDE)[name]
    model = oracle(kind, **keys)
    check(kind, policy.load(saved(model, tmp_path)), reference_logits(model, tokens(2, 70)))


def old_rope(config):
    """rope_theta and rope_scaling with `type`, as files from before transformers 5 have it."""
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    kind = settings.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else settings | {"type": kind}


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_the_old_spelling_of_rope_is_the_same_model(kind, tmp_path):
    keys = STANDARD[kind] | {
        "rope_parameters": STANDARD[kind]["rope_parameters"] | {"rope_theta": 5000.0}
    }
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
        result = [
            config.pop(k)
            for k in ("num_experts", "num_local_experts", "n_routed_experts")
            if k in config
        ]
        config[name] = result[0]

    edit_config(directory, rename)
    assert policy.load(directory).config.layers[1].feed_forward.router.experts == 8


def test_bfloat16_files_are_read_as_float32(tmp_path):
    import torch
    from transformers import DeepseekV3ForCausalLM

    directory = saved(oracle("DeepseekV3").to(torch.bfloat16), tmp_path)
    ours = policy.load(directory, dtype="float32")
    assert {str(array.dtype) for array in ours.params.values()} == {"float32"}
    row = tokens(2, 12)
    model = DeepseekV3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    expected = reference_logits(model, row)
    np.testing.assert_allclose(np.asarray(ours.logits(row)), expected, atol=2e-5, rtol=0)


def test_bfloat16_compute_is_close_and_keeps_the_correction_bias_in_float32(tmp_path):
    model = oracle("DeepseekV3")
    ours = policy.load(saved(model, tmp_path), dtype="bfloat16")
    kept = {path for path, array in ours.params.items() if str(array.dtype) == "float32"}
    assert kept == ours.graph.untrained and kept
    row = tokens(2, 12)
    result, expected = np.asarray(ours.logits(row)), reference_logits(model, row)
    assert result.dtype == np.float32
    # Rows whose choice of experts flips at low precision are far off; most rows are not.
    assert np.median(np.abs(result - expected)) < 0.05
