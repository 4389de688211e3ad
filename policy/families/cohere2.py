"""Command R7B, Command A and Aya (Cohere2ForCausalLM): attention and feed-forward side by side,
layer norms without biases, sliding layers that rotate adjacent pairs, and full layers without a
rotary embedding."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerNorm, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    layer_types,
    rope,
)

ARCHITECTURES = ("Cohere2ForCausalLM",)
MODEL_TYPES = ("cohere2",)
NAMES = names.ATTENTION | names.MLP
KINDS = ("full_attention", "sliding_attention")

# The values of absent keys, by the class of transformers. It has no `head_dim` of its own.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    dim = hf["hidden_size"] // hf["num_attention_heads"]
    if hf.get("head_dim") not in (None, dim):
        raise UnsupportedModel(
            f"head_dim {hf['head_dim']}: transformers takes hidden_size / num_attention_heads, "
            f"{dim}"
        )
    if hf["sliding_window"] is None:
        raise UnsupportedModel("sliding_window: null is not supported by this family")
    rotary = rope(hf, dim, interleaved=True)
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    every = hf["sliding_window_pattern"]
    derived = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    layers = []
    for kind in layer_types(hf, KINDS, derived):
        sliding = kind == "sliding_attention"
        mixer = attention(
            hf,
            rope=rotary if sliding else None,
            window=hf["sliding_window"] if sliding else None,
        )
        layers.append(LayerSpec(mixer, mlp, norms=("input_layernorm",), parallel=True))
    norm = LayerNorm(hf["layer_norm_eps"], bias=False)
    return decoder("cohere2", stored, hf, layers, norm=norm, logit_scale=float(hf["logit_scale"]))
