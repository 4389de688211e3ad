"""What we save, transformers loads with nothing missing and nothing left over, and computes the
same."""

import json

import numpy as np
import pytest
from oracles import (
    KINDS,
    STANDARD,
    by_kind,
    classes,
    configuration,
    edit_config,
    oracle,
    random_model,
    reference_logits,
    reload,
    saved,
    tokens,
)

import policy
from policy import families
from policy.huggingface import model_directory

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

CASES = {kind: (kind, STANDARD[kind]) for kind in STANDARD} | {
    "Llama-biases": (
        "Llama",
        {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "DeepseekV2-mlp_bias": ("DeepseekV2", {"mlp_bias": True, "q_lora_rank": None}),
    "DeepseekV3-no_shared": ("DeepseekV3", {"n_shared_experts": 0}),
}


@pytest.mark.parametrize("name", by_kind(CASES))
def test_transformers_loads_what_we_save(name, tmp_path, pair):
    kind, keys = CASES[name]
    ours = random_model(families.read(configuration(kind, **keys)))
    policy.save(ours, tmp_path)
    row = tokens(2, 70)
    result = reference_logits(reload(kind, tmp_path), row)
    ours = (
        pair(kind).with_weights_of(ours) if name in STANDARD else ours
    )  # the logits of a pair are compiled already
    np.testing.assert_allclose(
        result, np.asarray(ours.logits(row)), atol=KINDS[kind].logits, rtol=0
    )


@pytest.mark.parametrize("kind", by_kind())
def test_a_model_of_transformers_comes_back_bit_for_bit(kind, tmp_path, pair):
    policy.save(pair(kind).ours, tmp_path)
    back = reload(kind, tmp_path).state_dict()
    for name, tensor in pair(kind).theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name


def test_bfloat16_weights_come_back_as_bfloat16(tmp_path):
    ours = random_model(
        families.read(configuration("DeepseekV3")),
        runtime=policy.config.Runtime("bfloat16", "bfloat16"),
    )
    policy.save(ours, tmp_path)
    theirs = reload("DeepseekV3", tmp_path)
    assert theirs.lm_head.weight.dtype == torch.bfloat16
    assert theirs.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_auto_classes_find_the_saved_model_and_several_shards(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(model_directory, "SHARD_BYTES", 20_000)
    ours = random_model(families.read(configuration("Qwen3Moe")))
    policy.save(ours, tmp_path)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert set(
        json.loads((tmp_path / model_directory.INDEX).read_text())["weight_map"].values()
    ) == set(shards)
    row = tokens(1, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", attn_implementation="eager"
    )
    expected = np.asarray(ours.logits(row))
    np.testing.assert_allclose(reference_logits(theirs.eval(), row), expected, atol=2e-5, rtol=0)
    np.testing.assert_array_equal(np.asarray(policy.load(tmp_path).logits(row)), expected)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "DeepseekV2", "DeepseekV3"])
def test_fused_experts_are_read_like_single_ones(kind, tmp_path):
    from safetensors.torch import save_file

    theirs = oracle(kind, **STANDARD[kind])
    single = policy.load(saved(theirs, tmp_path))
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / model_directory.SINGLE, metadata={"format": "pt"})
    fused = policy.load(tmp_path)
    for path, array in single.params.items():
        np.testing.assert_array_equal(
            np.asarray(fused.params[path]), np.asarray(array), err_msg=path
        )


@pytest.mark.parametrize("kind", STANDARD)
def test_absent_keys_mean_what_the_class_of_transformers_says(kind, tmp_path):
    """For every default of ours, a configuration without the key reads as one where transformers
    wrote its default."""
    entry = KINDS[kind]
    full = classes(kind)[0](**entry.given).to_dict()
    required = {*entry.required, "intermediate_size"} & full.keys()
    named = {
        "architectures": [entry.model or f"{kind}ForCausalLM"],
        "model_type": full["model_type"],
    }
    bare = {key: full[key] for key in required} | entry.given
    assert without_json(families.read(bare | named)) == without_json(families.read(full | named))


def without_json(config):
    import dataclasses

    return dataclasses.replace(config, hf="")


def test_a_head_on_disk_is_accepted_where_it_is_tied(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = oracle("Qwen3", tie_word_embeddings=True)
    directory = saved(theirs, tmp_path)
    state = load_file(directory / model_directory.SINGLE)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, directory / model_directory.SINGLE, metadata={"format": "pt"})
    row = tokens(1, 12)
    result = np.asarray(policy.load(directory).logits(row))
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=2e-5, rtol=0)


def test_a_row_of_old_rope_keys_survives_saving(tmp_path):
    """config.json is written as it was read, so the old spelling still means the same to
    transformers."""
    theirs = oracle("Llama", **STANDARD["Llama"])
    directory = saved(theirs, tmp_path / "in")

    def old(config):
        settings = config.pop("rope_parameters")
        config |= {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}
        settings["type"] = settings.pop("rope_type")

    edit_config(directory, old)
    policy.save(policy.load(directory), tmp_path / "out")
    row = tokens(1, 12)
    result = reference_logits(reload("Llama", tmp_path / "out"), row)
    np.testing.assert_allclose(result, reference_logits(theirs, row), atol=1e-6, rtol=0)
