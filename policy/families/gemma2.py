"""Gemma 2 (arXiv 2408.00118): norms before and after each part, every other layer with a sliding
window, soft caps."""

from __future__ import annotations

from policy.config import SANDWICH_NORM, Attention, DecoderConfig, LayerSpec, Mlp, Norm
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

ARCHITECTURES = ("Gemma2ForCausalLM",)
MODEL_TYPES = ("gemma2",)
NAMES = names.ATTENTION | names.MLP | names.NORMS_BY_ROLE

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf["use_bidirectional_attention"]:
        raise UnsupportedModel(
            "gemma2: use_bidirectional_attention is not supported: the decoder is causal"
        )
    alternating = [
        "full_attention" if i % 2 else "sliding_attention" for i in range(hf["num_hidden_layers"])
    ]
    kinds = layer_types(hf, ("full_attention", "sliding_attention"), alternating)
    mlp = Mlp(hf["intermediate_size"], activation(hf, "hidden_activation"))
    return decoder(
        "gemma2",
        stored,
        hf,
        [LayerSpec(_mixer(hf, kind), mlp, SANDWICH_NORM) for kind in kinds],
        norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        embedding_scale=hf["hidden_size"] ** 0.5,
        logit_softcap=hf["final_logit_softcapping"],
    )


def _mixer(hf: dict, kind: str) -> Attention:
    """Creates the attention of one layer. The softmax scale comes from `query_pre_attn_scalar`,
    which is not the head dimension in the 27B model."""
    return attention(
        hf,
        scale=hf["query_pre_attn_scalar"] ** -0.5,
        rope=rope(hf, head_dim(hf)),
        window=hf["sliding_window"] if kind == "sliding_attention" else None,
        softcap=hf["attn_logit_softcapping"],
    )
