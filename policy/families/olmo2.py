"""OLMo 2 (Olmo2ForCausalLM): norms on the outputs of a layer's parts only, and one norm over all
heads of queries and keys."""

from __future__ import annotations

from policy.config import POST_NORM, DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, rope

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPES = ("olmo2",)
NAMES = names.ATTENTION | names.NORMS_BY_ROLE | names.MLP

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    norm = Norm(eps=hf["rms_norm_eps"], scale="before_cast")
    mixer = attention(hf, rope=rope(hf, head_dim(hf)), qk_norm=norm, qk_norm_over="all_heads")
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    layers = [LayerSpec(mixer, mlp, norms=POST_NORM)] * hf["num_hidden_layers"]
    return decoder("olmo2", stored, hf, layers, norm=norm)
