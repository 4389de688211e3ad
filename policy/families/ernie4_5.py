"""ERNIE 4.5 dense (Ernie4_5ForCausalLM): Llama whose rotary embedding turns adjacent pairs."""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, rope

ARCHITECTURES = ("Ernie4_5ForCausalLM",)
MODEL_TYPES = ("ernie4_5",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    return decoder(
        "ernie4_5", stored, hf, [LayerSpec(mixer(hf), dense(hf))] * hf["num_hidden_layers"]
    )


def mixer(hf: dict) -> Attention:
    """Creates the attention of a layer; `use_bias` gives all projections biases."""
    rotary = rope(hf, head_dim(hf), interleaved=True)
    return attention(hf, rope=rotary, bias=bool(hf["use_bias"]), out_bias=bool(hf["use_bias"]))


def dense(hf: dict) -> Mlp:
    """Creates the dense feed-forward of a layer."""
    return Mlp(hf["intermediate_size"], activation(hf), bias=bool(hf["use_bias"]))
