"""Llama 2, 3, 3.1, 3.2 (LlamaForCausalLM)."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, rope

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mixer = attention(hf, rope=rope(hf, head_dim(hf)))
    mlp = Mlp(hf["intermediate_size"], activation(hf), bias=bool(hf["mlp_bias"]))
    return decoder("llama", stored, hf, [LayerSpec(mixer, mlp)] * hf["num_hidden_layers"])
