"""Mistral Small 4 (Mistral4ForCausalLM), also as the text model inside
Mistral3ForConditionalGeneration: the layers of DeepSeek V3 with softmax routing and queries that
grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policy.config import DecoderConfig, LatentAttention, LayerSpec, Moe, QueryTemperature
from policy.families import deepseek, ministral3
from policy.fields import names
from policy.fields.config_fields import UnsupportedModel, decoder

ARCHITECTURES = ("Mistral4ForCausalLM",)
MODEL_TYPES = ("mistral4",)
# The Hub stores the experts fused.
NAMES = deepseek.NAMES | names.fused(names.MOE)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = _complete(stored)
    temperature = ministral3.temperature(hf)
    layers = [_layer(layer, temperature) for layer in deepseek.layers(hf, v3=True)]
    return decoder("mistral4", stored, hf, layers)


def _complete(stored: dict) -> dict:
    """Returns the configuration with every key of DeepSeek V3. There is no indexer."""
    hf: dict[str, Any] = DEFAULTS | stored | {"index_topk": None, "mlp_layer_types": None}
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    settings: dict[str, Any] = dict(hf.get(key) or ROPE)
    # It says how large the rotated part of a query is, which has a key of its own.
    partial = settings.pop("partial_rotary_factor", None)
    rotated = hf["qk_rope_head_dim"]
    total = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    if partial is not None and int(total * partial) != rotated:
        raise UnsupportedModel(
            f"{key}.partial_rotary_factor {partial}: qk_rope_head_dim is {rotated} of {total}"
        )
    return hf | {key: settings}


def _layer(layer: LayerSpec, temperature: QueryTemperature | None) -> LayerSpec:
    """Returns a layer of DeepSeek V3 in the form of Mistral 4."""
    assert isinstance(layer.mixer, LatentAttention)
    mixer = replace(layer.mixer, temperature=temperature)
    experts = layer.feed_forward
    if isinstance(experts, Moe):
        router = replace(experts.router, score="softmax", correction_bias=False)
        experts = replace(experts, router=router)
    return replace(layer, mixer=mixer, feed_forward=experts)


def empty_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Returns the stored tensors without elements."""
    return deepseek.empty_shared_experts(_complete(hf))
