"""OLMo 3 (Olmo3ForCausalLM): norms on the outputs of a layer's parts only, and one norm over all
heads of queries and keys."""

from __future__ import annotations

from policy.config import POST_NORM, DecoderConfig, LayerSpec, Mlp, Norm, Rope
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    layer_types,
    rope,
)

ARCHITECTURES = ("Olmo3ForCausalLM",)
MODEL_TYPES = ("olmo3",)
NAMES = names.ATTENTION | names.NORMS_BY_ROLE | names.MLP

KINDS = ("sliding_attention", "full_attention")
THETA = 500000.0
# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sliding_window": 4096,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    norm = Norm(eps=hf["rms_norm_eps"], scale="before_cast")
    ropes = _ropes(hf)
    mlp = Mlp(hf["intermediate_size"], activation(hf))

    def layer(kind: str) -> LayerSpec:
        mixer = attention(
            hf,
            rope=ropes[kind],
            qk_norm=norm,
            qk_norm_over="all_heads",
            window=hf["sliding_window"] if kind == "sliding_attention" else None,
        )
        return LayerSpec(mixer, mlp, norms=POST_NORM)

    derived = [KINDS[(i + 1) % 4 == 0] for i in range(hf["num_hidden_layers"])]
    return decoder(
        "olmo3", stored, hf, [layer(kind) for kind in layer_types(hf, KINDS, derived)], norm=norm
    )


def _ropes(hf: dict) -> dict[str, Rope]:
    """Returns the rotary embedding of each kind of layer. Settings in the old form, `rope_theta`
    and `rope_scaling`, belong to full attention: transformers then uses the default base for
    sliding layers and never scales them. It reads yarn's `truncate` at the level of the kinds."""
    new = hf.get("rope_parameters") or {}
    if new and not any(kind in new for kind in KINDS):
        raise UnsupportedModel(
            f"rope_parameters: expected settings for each of {', '.join(KINDS)}, got "
            f"{', '.join(new)}"
        )
    settings = {
        kind: (new.get(kind) or {}) | {"truncate": new.get("truncate", True)} for kind in KINDS
    }
    settings["full_attention"] |= hf.get("rope_scaling") or {}
    settings["sliding_attention"].setdefault("rope_theta", THETA)
    return {
        kind: rope(
            hf | {"rope_scaling": None, "rope_parameters": settings}, head_dim(hf), layer_type=kind
        )
        for kind in KINDS
    }
