"""Gemma (GemmaForCausalLM): zero-centred norms, an embedding multiplied by the root of the hidden
size, a tied head."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    rope,
)

ARCHITECTURES = ("GemmaForCausalLM",)
MODEL_TYPES = ("gemma",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf["use_bidirectional_attention"]:
        raise UnsupportedModel(
            "gemma: use_bidirectional_attention is not supported: the decoder is causal"
        )
    # The first releases say "gelu" and were trained with its tanh form.
    act = "gelu_tanh" if hf["hidden_act"] == "gelu" else activation(hf)
    mixer = attention(hf, rope=rope(hf, head_dim(hf)))
    layer = LayerSpec(mixer, Mlp(hf["intermediate_size"], act))
    return decoder(
        "gemma",
        stored,
        hf,
        [layer] * hf["num_hidden_layers"],
        norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        embedding_scale=hf["hidden_size"] ** 0.5,
    )
