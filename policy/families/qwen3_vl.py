"""Qwen3-VL (Qwen3VLForConditionalGeneration), text side: Qwen3 with rotary sections, whose first
layers receive deepstack features of the vision tower."""

from __future__ import annotations

from typing import Any

from policy.config import DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    deepstack_layers,
    head_dim,
    rope,
    rope_by_sections,
    unwrapped,
)

ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_text")
WRAPPED = ("model.", "model.language_model.")
MULTIMODAL = (("visual.", "model.visual."), WRAPPED)
TOWERS = {"image": names.moved(tower_files.GRID_VISION, ("", ""), ("", "visual."))}
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 500000.0,
}
SECTIONS = (24, 20, 20)
# After which layers of the tower a feature is taken; as many layers of the decoder receive one.
DEEPSTACK = (8, 16, 24)


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | unwrapped(stored)
    rotary = rope_by_sections(rope(hf, head_dim(hf)), hf, SECTIONS)
    mixer = attention(hf, rope=rotary, qk_norm=Norm(eps=hf["rms_norm_eps"]))
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    features = deepstack_layers(stored, DEEPSTACK)
    layers = [LayerSpec(mixer, mlp, deepstack=n < features) for n in range(hf["num_hidden_layers"])]
    return decoder("qwen3_vl", stored, hf, layers)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {"image": tower_files.grid_vision(stored["vision_config"], DEEPSTACK)}
