"""Qwen2.5-VL (Qwen2_5_VLForConditionalGeneration), text side: Qwen2 with rotary sections in blocks.
Released configurations are flat: they hold the keys of the text model next to `vision_config`."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.huggingface import names
from policy.huggingface.config_fields import (
    activation,
    attention,
    decoder,
    head_dim,
    rope_by_sections,
    rope_from_settings,
    rope_parameters,
    unwrapped,
    windows_from_layer,
)

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
MODEL_TYPES = ("qwen2_5_vl", "qwen2_5_vl_text")
WRAPPED = ("model.", "model.language_model.")
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "layer_types": None,
}
SECTIONS = (16, 24, 24)


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | unwrapped(stored)
    settings = rope_parameters(hf)
    if settings["rope_type"] == "mrope":  # the name of sections in older files
        settings["rope_type"] = "default"
    plain = rope_from_settings(settings, head_dim(hf))
    rotary = rope_by_sections(plain, hf, SECTIONS, blocks=True)
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    layers = [
        LayerSpec(attention(hf, rope=rotary, bias=True, out_bias=False, window=window), mlp)
        for window in windows_from_layer(hf)
    ]
    return decoder("qwen2_5_vl", stored, hf, layers)
