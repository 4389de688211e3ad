"""Mistral 7B and models of its class (MistralForCausalLM): Llama where every layer may have a
sliding window."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, layer_types, rope

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPES = ("mistral",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. A `sliding_window` of null is no window.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    # All layers are of one kind: the class of transformers ignores `layer_types`, so another kind
    # there is refused.
    kind = "full_attention" if hf["sliding_window"] is None else "sliding_attention"
    layers = layer_types(hf, (kind,), [kind] * hf["num_hidden_layers"])
    mixer = attention(hf, rope=rope(hf, head_dim(hf)), window=hf["sliding_window"])
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    return decoder("mistral", stored, hf, [LayerSpec(mixer, mlp) for _ in layers])
