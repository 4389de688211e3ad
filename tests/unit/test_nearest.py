"""What is said of a model that no family has: the nearest family, and what differs."""

import json

import numpy as np
import pytest
from oracles import configuration
from safetensors.numpy import save_file

from policy import families
from policy.huggingface import sources

ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]


def refusal(directory, hf: dict, names: list[str]) -> str:
    (directory / "config.json").write_text(json.dumps(hf))
    tensors = {
        f"model.layers.{n}.{name}": np.zeros(1, np.float32) for n in (0, 11) for name in names
    }
    save_file(
        tensors | {"model.norm.weight": np.zeros(1, np.float32)}, directory / "model.safetensors"
    )
    with pytest.raises(families.UnknownModel) as refused:
        sources.read_config(directory)
    return str(refused.value)


def unknown(model_type: str, **keys) -> dict:
    return (
        configuration("Llama")
        | {"architectures": ["OtherForCausalLM"], "model_type": model_type}
        | keys
    )


def test_tensors_that_the_layer_lacks_are_named(tmp_path):
    text = refusal(tmp_path, unknown("arcee"), [*ATTENTION, *MLP[1:], *NORMS])
    assert "The nearest is llama" in text
    assert "its layers lack mlp.gate_proj.weight" in text


def test_other_tensors_and_keys_are_named(tmp_path):
    names = [*ATTENTION, *MLP, *NORMS, "self_attn.sub_norm.weight"]
    text = refusal(tmp_path, unknown("bitnet", use_sub_norm=True), names)
    assert "its layers have the tensors self_attn.sub_norm.weight" in text
    assert "use_sub_norm" in text and "hidden_size" not in text


def test_experts_are_nearest_to_a_family_with_experts(tmp_path):
    experts = [
        f"mlp.experts.{e}.{name}_proj.weight" for e in range(2) for name in ("gate", "up", "down")
    ]
    text = refusal(tmp_path, unknown("some_moe"), [*ATTENTION, *experts, *NORMS, "mlp.gate.weight"])
    assert text.split("The nearest is ")[1].split(";")[0] in ("mixtral", "qwen2_moe", "qwen3_moe")
    assert "may use them otherwise" in text


def test_shards_of_a_table_count_as_one_tensor(tmp_path):
    stored = {place.name for place in families.get("qwen4_exp").NAMES.values()}
    names = [name.format(e=number, s=number) for name in stored for number in range(20)]
    text = refusal(tmp_path, unknown("other_exp"), [*dict.fromkeys(names)])
    assert "The nearest is qwen4_exp_text" in text and "shard" not in text


@pytest.mark.parametrize(
    ("asked", "nearest"), [("qwen2_5", "qwen2"), ("gemma3n_text", "gemma3_text")]
)
def test_without_files_the_spelling_decides(asked, nearest):
    with pytest.raises(families.UnknownModel, match=f"The nearest is {nearest}"):
        families.read(unknown(asked))
