"""Llama 2, 3, 3.1, 3.2 (LlamaForCausalLM)."""

from __future__ import annotations

import json

from policy import names
from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Norm
from policy.hf import first, rope, stacks

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)
NAMES = names.ATTENTION | names.MLP
SKIP = (r".*rotary_emb\.inv_freq",)


def read(hf: dict) -> DecoderConfig:
    heads = hf["num_attention_heads"]
    head_dim = first(hf, "head_dim", default=hf["hidden_size"] // heads)
    bias = bool(hf.get("attention_bias", False))
    mixer = Attention(
        heads=heads,
        kv_heads=first(hf, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(hf, head_dim),
        bias=bias,
        out_bias=bias,
    )
    mlp = Mlp(hf["intermediate_size"], bias=bool(hf.get("mlp_bias", False)))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks([LayerSpec(mixer, mlp)] * hf["num_hidden_layers"]),
        norm=Norm(eps=first(hf, "rms_norm_eps", default=1e-6)),
        family="llama",
        hf=json.dumps(hf, sort_keys=True),
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )
