"""Ministral 3 (Ministral3ForCausalLM), also as the text model inside
Mistral3ForConditionalGeneration:
Mistral with yarn and queries that grow with their position."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, QueryTemperature
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

ARCHITECTURES = ("Ministral3ForCausalLM",)
MODEL_TYPES = ("ministral3",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. A `sliding_window` of null is no window.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_parameters"] = ROPE
    mixer = attention(
        hf,
        rope=rope(hf, head_dim(hf)),
        window=hf["sliding_window"],
        temperature=temperature(hf),
    )
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    return decoder("ministral3", stored, hf, [LayerSpec(mixer, mlp)] * hf["num_hidden_layers"])


def temperature(hf: dict) -> QueryTemperature | None:
    """Returns the factor of queries; None if `llama_4_scaling_beta` is 0."""
    settings = rope_parameters(hf)
    beta = settings.get("llama_4_scaling_beta")
    if beta is None:
        raise UnsupportedModel(
            "rope_parameters.llama_4_scaling_beta: the key is missing; 0 leaves queries as they are"
        )
    original = settings["original_max_position_embeddings"]
    return QueryTemperature(float(beta), float(original), offset=0) if beta else None
