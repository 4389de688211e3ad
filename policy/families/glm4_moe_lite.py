"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): the layers of DeepSeek V3."""

from __future__ import annotations

from policy.config import DecoderConfig
from policy.families import deepseek
from policy.fields.config_fields import UnsupportedModel, decoder

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)
MODEL_TYPES = ("glm4_moe_lite",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = deepseek.NAMES
# Layers past num_hidden_layers predict further tokens. transformers ignores them in a file under
# the number that the published model has.
SKIP_EXTRA_LAYERS = True
PASSED_OVER = r"model\.layers\.47\."

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_interleave": True,
    "mlp_layer_types": None,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    if stored.get("first_k_dense_replace", 1) != 1 and not stored.get("mlp_layer_types"):
        raise UnsupportedModel(
            f"first_k_dense_replace {stored['first_k_dense_replace']}: transformers does not read "
            "this key in a "
            "glm4_moe_lite configuration; write mlp_layer_types, dense or sparse for each layer"
        )
    hf = _complete(stored)
    return decoder("glm4_moe_lite", stored, hf, deepseek.layers(hf, v3=True))


def _complete(stored: dict) -> dict:
    """Returns the configuration with every key of DeepSeek V3. Without `mlp_layer_types` only the
    first layer is dense; there is no indexer."""
    return DEFAULTS | stored | {"first_k_dense_replace": 1, "index_topk": None}


def empty_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Returns the stored tensors without elements."""
    return deepseek.empty_shared_experts(_complete(hf))
