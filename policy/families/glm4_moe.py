"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7 (Glm4MoeForCausalLM): grouped-query attention with a
rotary embedding over half of each head, and the experts of DeepSeek V3 after a dense prefix."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Norm
from policy.families import deepseek
from policy.fields import names
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    head_dim,
    rope_from_settings,
    rope_parameters,
)

ARCHITECTURES = ("Glm4MoeForCausalLM",)
MODEL_TYPES = ("glm4_moe",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = names.ATTENTION | names.MLP | deepseek.EXPERT_NAMES
# Layers past num_hidden_layers predict further tokens. transformers ignores them in a file under
# the numbers that the published models have.
SKIP_EXTRA_LAYERS = True
PASSED_OVER = r"model\.layers\.(46|92)\."

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mixer = attention(
        hf,
        rope=rope_from_settings(rope_parameters(hf), head_dim(hf)),
        qk_norm=Norm(eps=hf["rms_norm_eps"]) if hf["use_qk_norm"] else None,
        out_bias=False,
    )
    dense = Mlp(hf["intermediate_size"], activation(hf))
    experts = deepseek.mixture(hf, v3=True)
    layers = [
        LayerSpec(mixer, dense if i < hf["first_k_dense_replace"] else experts)
        for i in range(hf["num_hidden_layers"])
    ]
    return decoder("glm4_moe", stored, hf, layers)


def empty_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Returns the stored tensors without elements."""
    return deepseek.empty_shared_experts(DEFAULTS | hf)
