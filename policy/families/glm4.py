"""GLM-4-0414 and GLM-Z1 (Glm4ForCausalLM): norms before and after each part, and a rotary embedding
of adjacent pairs over a part of each head."""

from __future__ import annotations

from policy.config import SANDWICH_NORM, DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    head_dim,
    rope_from_settings,
    rope_parameters,
)
from policy.fields.names import Stored

ARCHITECTURES = ("Glm4ForCausalLM",)
MODEL_TYPES = ("glm4",)
# `post_attention_layernorm` of a file stands before the feed-forward, as in names.ATTENTION.
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.joined(
        "feed_forward.", ("gate_proj", "up_proj"), "mlp.gate_up_proj.weight", "f+ e -> e f"
    )
    | {
        "post_attention_layernorm.weight": Stored("post_self_attn_layernorm.weight"),
        "post_feedforward_layernorm.weight": Stored("post_mlp_layernorm.weight"),
    }
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1.5625e-7,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    rotary = rope_from_settings(rope_parameters(hf), head_dim(hf), interleaved=True)
    mixer = attention(hf, rope=rotary, out_bias=False)
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    layers = [LayerSpec(mixer, mlp, SANDWICH_NORM)] * hf["num_hidden_layers"]
    return decoder("glm4", stored, hf, layers)
