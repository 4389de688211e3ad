"""Qwen3 dense (Qwen3ForCausalLM): Llama with a norm on each head's query and key."""

from __future__ import annotations

import json

from policy import names
from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Norm
from policy.hf import first, rope, stacks

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)
NAMES = names.ATTENTION | names.MLP


def read(hf: dict) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks([LayerSpec(mixer, Mlp(hf["intermediate_size"])) for mixer in mixers(hf)]),
        norm=Norm(eps=first(hf, "rms_norm_eps", default=1e-6)),
        family="qwen3",
        hf=json.dumps(hf, sort_keys=True),
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )


def mixers(hf: dict) -> list[Attention]:
    """The attention of each layer; layers named sliding_attention see `sliding_window` tokens."""
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    head_dim = first(hf, "head_dim", default=128)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types") or [
        "sliding_attention" if window and i >= hf.get("max_window_layers", 28) else "full_attention" for i in range(layers)
    ]
    bias = bool(hf.get("attention_bias", False))
    return [
        Attention(
            heads=heads,
            kv_heads=first(hf, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope(hf, head_dim),
            qk_norm=Norm(eps=first(hf, "rms_norm_eps", default=1e-6)),
            bias=bias,
            out_bias=bias,
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    ]
