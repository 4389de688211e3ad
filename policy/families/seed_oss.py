"""Seed-OSS (SeedOssForCausalLM): Llama with biases on queries, keys and values, and heads that are
wider than the hidden state."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, rope

ARCHITECTURES = ("SeedOssForCausalLM",)
MODEL_TYPES = ("seed_oss",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mixer = attention(hf, rope=rope(hf, head_dim(hf)), out_bias=bool(hf["attention_out_bias"]))
    mlp = Mlp(hf["intermediate_size"], activation(hf), bias=bool(hf["mlp_bias"]))
    return decoder("seed_oss", stored, hf, [LayerSpec(mixer, mlp)] * hf["num_hidden_layers"])
