"""Qwen2.5-VL (Qwen2_5_VLForConditionalGeneration): Qwen2 with rotary sections in blocks, and a
vision tower. Released configurations are flat: they hold the keys of the text model next to
`vision_config`. Both forms are written as they were read."""

from __future__ import annotations

from typing import Any

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    UnsupportedModel,
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
# The files have the names of the tables, as released and as transformers writes them.
WRAPPED = ("", "")
MULTIMODAL = ()
MEMORY_PREFIXES = (("visual.", "model.visual."), ("model.", "model.language_model."))
TOWERS = {"image": names.moved(tower_files.WINDOW_VISION, ("", ""), ("", "visual."))}
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
    hf = DEFAULTS | unwrapped(stored) | _tied(stored)
    _check_heads(hf)
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


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {"image": tower_files.window_vision(stored["vision_config"])}


def _tied(stored: dict) -> dict:
    """Returns that the head is tied if either the wrapper or the text model inside says so, as the
    class does."""
    inner = stored.get("text_config")
    return (
        {"tie_word_embeddings": True}
        if isinstance(inner, dict) and inner.get("tie_word_embeddings")
        else {}
    )


def _check_heads(hf: dict) -> None:
    """Raises UnsupportedModel for heads that the class cannot compute: its projections have
    hidden_size outputs."""
    width = hf["hidden_size"]
    heads = hf["num_attention_heads"]
    if width % heads:
        raise UnsupportedModel(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}"
        )
    if head_dim(hf) * heads != width:
        raise UnsupportedModel(
            f"head_dim {hf['head_dim']} must be hidden_size / num_attention_heads, "
            f"{width // heads}: the class of transformers computes no other"
        )
