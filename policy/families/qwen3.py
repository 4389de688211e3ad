"""Qwen3 dense (Qwen3ForCausalLM): Llama with a norm on each head's query and key."""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, rope, windows_from_layer

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    return decoder(
        "qwen3",
        stored,
        hf,
        [LayerSpec(mixer, Mlp(hf["intermediate_size"], activation(hf))) for mixer in mixers(hf)],
    )


def mixers(hf: dict) -> list[Attention]:
    """Returns the attention of each layer; sliding_attention layers see `sliding_window` tokens."""
    norm = Norm(eps=hf["rms_norm_eps"])
    rotary = rope(hf, hf["head_dim"])
    return [
        attention(hf, rope=rotary, qk_norm=norm, window=window) for window in windows_from_layer(hf)
    ]
