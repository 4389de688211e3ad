"""SmolLM3 (SmolLM3ForCausalLM): Llama without a rotary embedding in some layers."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    head_dim,
    layer_windows,
    rope,
)

ARCHITECTURES = ("SmolLM3ForCausalLM",)
MODEL_TYPES = ("smollm3",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 2000000.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    rotary = rope(hf, head_dim(hf))
    rotates = _rotating_layers(hf)
    # By default the layers without a rotary embedding have the window.
    derived = ["full_attention" if turns else "sliding_attention" for turns in rotates]
    mlp = Mlp(hf["intermediate_size"], activation(hf), bias=bool(hf["mlp_bias"]))
    layers = [
        LayerSpec(attention(hf, rope=rotary if turns else None, window=window), mlp)
        for turns, window in zip(rotates, layer_windows(hf, derived), strict=True)
    ]
    return decoder("smollm3", stored, hf, layers)


def _rotating_layers(hf: dict) -> list[bool]:
    """Returns whether each layer has a rotary embedding. `no_rope_layers` holds 1 where it has
    one, in spite of its name."""
    layers = hf["num_hidden_layers"]
    interval = hf["no_rope_layer_interval"]
    derived = [(i + 1) % interval != 0 for i in range(layers)]
    flags = first(hf, "no_rope_layers", default=derived)
    if len(flags) != layers:
        raise UnsupportedModel(f"no_rope_layers: {len(flags)} entries for {layers} layers")
    return [bool(flag) for flag in flags]
