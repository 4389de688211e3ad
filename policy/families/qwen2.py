"""Qwen2 and Qwen2.5 dense (Qwen2ForCausalLM), and what is trained from them, such as QwQ and the
DeepSeek-R1 distillations: Llama with biases on queries, keys and values."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    rope,
    windows_from_layer,
)

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPES = ("qwen2",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf.get("dual_chunk_attention_config"):
        raise UnsupportedModel(
            "dual_chunk_attention_config: the sparse attention of the 1M models is not supported; "
            "delete the key to read the model with full attention, as transformers does"
        )
    rotary = rope(hf, head_dim(hf))
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    layers = [
        LayerSpec(attention(hf, rope=rotary, bias=True, out_bias=False, window=window), mlp)
        for window in windows_from_layer(hf)
    ]
    return decoder("qwen2", stored, hf, layers)
