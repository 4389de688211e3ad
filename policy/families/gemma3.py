"""Gemma 3 (arXiv 2503.19786), text model: five layers with a sliding window for each full one,
normed queries and keys."""

from __future__ import annotations

from typing import Any

from policy.config import SANDWICH_NORM, Attention, DecoderConfig, LayerSpec, Mlp, Norm
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    head_dim,
    layer_types,
    rope,
)

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
MODEL_TYPES = ("gemma3_text", "gemma3")
KINDS = ("full_attention", "sliding_attention")
MULTIMODAL = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
# The spelling of released files, also as transformers 4 has it in memory.
PREFIXES = tuple(
    (f"{outer}vision_tower.vision_model.", "vision_tower.") for outer in ("", "model.")
)
TOWERS = {"image": tower_files.SIGLIP}
NAMES = names.ATTENTION | names.MLP | names.NORMS_BY_ROLE

# The values of absent keys, by the class of transformers. Files of multimodal models leave many
# out.
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf["use_bidirectional_attention"]:
        raise UnsupportedModel(
            "gemma3: use_bidirectional_attention is not supported: the decoder is causal"
        )
    every = hf["sliding_window_pattern"]
    derived = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    kinds = layer_types(hf, KINDS, derived)
    mlp = Mlp(hf["intermediate_size"], activation(hf, "hidden_activation"))
    return decoder(
        "gemma3",
        stored,
        hf,
        [LayerSpec(_mixer(hf, kind), mlp, SANDWICH_NORM) for kind in kinds],
        norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        embedding_scale=hf["hidden_size"] ** 0.5,
        logit_softcap=hf["final_logit_softcapping"],
    )


def _mixer(hf: dict, kind: str) -> Attention:
    """Creates the attention of one layer. transformers computes no `attn_logit_softcapping`, so the
    key is not read."""
    return attention(
        hf,
        scale=hf["query_pre_attn_scalar"] ** -0.5,
        rope=rope(hf | _rope_parameters(hf), head_dim(hf), layer_type=kind),
        qk_norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        window=hf["sliding_window"] if kind == "sliding_attention" else None,
        looks_ahead=True,
    )


def _rope_parameters(hf: dict) -> dict:
    """Returns the rotary settings in the new spelling. In the old one `rope_scaling` and
    `rope_theta` belong to the full layers, and `rope_local_base_freq` is the base of the others,
    which are not scaled. Yarn's `truncate` is at the level of the layer kinds."""
    new = first(hf, "rope_parameters", default={})
    if new and not any(kind in new for kind in KINDS):
        raise UnsupportedModel(
            f"gemma3: rope_parameters: expected settings for {' and '.join(KINDS)}, got "
            f"{', '.join(new)}"
        )
    full, sliding = (
        (new.get(kind) or {}) | {"truncate": new.get("truncate", True)} for kind in KINDS
    )
    scaling = hf.get("rope_scaling") or {}
    if (
        scaling and "rope_type" not in scaling
    ):  # transformers then scales nothing, whatever `type` is
        raise UnsupportedModel(f"gemma3: rope_scaling lacks rope_type, got {', '.join(scaling)}")
    full |= scaling
    full.setdefault("rope_theta", first(hf, "rope_theta", default=1_000_000.0))
    sliding.setdefault("rope_theta", first(hf, "rope_local_base_freq", default=10_000.0))
    return {"rope_parameters": dict(zip(KINDS, (full, sliding), strict=True)), "rope_scaling": None}


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {
        "image": tower_files.siglip(
            stored["vision_config"], first(stored, "mm_tokens_per_image", default=256)
        )
    }
