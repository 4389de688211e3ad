"""EXAONE 4 (Exaone4ForCausalLM): norms on the outputs of a layer's parts only, normed queries and
keys, and in models with a sliding window no rotary embedding in the full layers."""

from __future__ import annotations

from policy.config import POST_NORM, DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, layer_types, rope

ARCHITECTURES = ("Exaone4ForCausalLM",)
MODEL_TYPES = ("exaone4",)
NAMES = names.ATTENTION | names.NORMS_BY_ROLE | names.MLP
KINDS = ("full_attention", "sliding_attention")

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    norm = Norm(eps=hf["rms_norm_eps"])
    rotary = rope(hf, head_dim(hf))
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    layers = []
    for kind in layer_types(hf, KINDS, _derived(hf)):
        sliding = kind == "sliding_attention"
        mixer = attention(
            hf,
            rope=rotary if sliding or hf["sliding_window"] is None else None,
            qk_norm=norm,
            window=hf["sliding_window"] if sliding else None,
        )
        layers.append(LayerSpec(mixer, mlp, norms=POST_NORM))
    return decoder("exaone4", stored, hf, layers)


def _derived(hf: dict) -> list[str]:
    """Returns the kinds of the layers where the configuration does not list them: all full without
    a window, else by `sliding_window_pattern`, which is a number (every how many layers one is
    full) or letters to repeat, L for a local layer and G for a global one."""
    layers = range(hf["num_hidden_layers"])
    pattern = hf["sliding_window_pattern"]
    if hf["sliding_window"] is None:
        return ["full_attention" for _ in layers]
    if isinstance(pattern, str):
        return [
            "sliding_attention" if pattern[i % len(pattern)] == "L" else "full_attention"
            for i in layers
        ]
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]
