"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Phi3ForCausalLM): Llama with its projections stored in one
tensor, a sliding window, and LongRoPE in the models of 128k tokens."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    rope_from_settings,
    rope_parameters,
)

ARCHITECTURES = ("Phi3ForCausalLM",)
MODEL_TYPES = ("phi3",)
NAMES = (
    names.ATTENTION
    | names.joined(
        "mixer.", ("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj.weight", "(h d)+ e -> e h d"
    )
    | names.MLP
    | names.joined(
        "feed_forward.", ("gate_proj", "up_proj"), "mlp.gate_up_proj.weight", "f+ e -> e f"
    )
)

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    settings = rope_parameters(hf)
    if settings["rope_type"] in ("su", "yarn"):  # what older files call it
        settings = rope_parameters(hf | {"rope_scaling": settings | {"rope_type": "longrope"}})
    if settings["rope_type"] not in ("default", "longrope"):
        raise UnsupportedModel(
            f"rope_type {settings['rope_type']!r} is not supported by this family"
        )
    mixer = attention(hf, rope=rope_from_settings(settings, head_dim(hf)), window=_window(hf))
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    return decoder("phi3", stored, hf, [LayerSpec(mixer, mlp)] * hf["num_hidden_layers"])


def _window(hf: dict) -> int | None:
    """Returns how many tokens attention sees, None: all of them, as with a window that no sequence
    fills."""
    window = hf["sliding_window"]
    return window if window is not None and window < hf["max_position_embeddings"] else None
