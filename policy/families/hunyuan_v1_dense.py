"""Hunyuan dense, 0.5B to 7B (HunYuanDenseV1ForCausalLM): Llama with queries and keys that are
normed after their rotation."""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    rope,
    rope_parameters,
)
from policy.fields.names import Stored

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)
MODEL_TYPES = ("hunyuan_v1_dense",)
ATTENTION = names.ATTENTION | {
    "mixer.q_norm.weight": Stored("self_attn.query_layernorm.weight"),
    "mixer.k_norm.weight": Stored("self_attn.key_layernorm.weight"),
}
NAMES = ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    return decoder(
        "hunyuan_v1_dense", stored, hf, [LayerSpec(mixer(hf), mlp)] * hf["num_hidden_layers"]
    )


def mixer(hf: dict) -> Attention:
    """Creates the attention of a layer. The rotary type `dynamic` with `alpha` means a longer base
    at all lengths, theta alpha^(d / (d - 2)) for heads of d dimensions."""
    if hf.get("use_cla"):
        raise UnsupportedModel(
            "use_cla: keys and values that layers share are not supported by this family"
        )
    settings = rope_parameters(hf)
    dim = head_dim(hf)
    if settings["rope_type"] == "dynamic":
        if not settings.get("alpha"):
            raise UnsupportedModel(
                "rope_type 'dynamic' is supported with alpha only: another base at all lengths"
            )
        base = settings["rope_theta"] * settings["alpha"] ** (dim / (dim - 2))
        settings |= {"rope_type": "default", "rope_theta": base}
    norm = Norm(eps=hf["rms_norm_eps"])
    rotary = rope(hf | {"rope_scaling": settings}, dim)
    return attention(hf, rope=rotary, qk_norm=norm, qk_norm_over="rotated_head")
