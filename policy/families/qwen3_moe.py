"""Qwen3 mixture of experts (Qwen3MoeForCausalLM)."""

from __future__ import annotations

import json

from policy import names
from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.hf import first, rope, stacks

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)
NAMES = names.ATTENTION | names.MLP | names.MOE


def read(hf: dict) -> DecoderConfig:
    heads, eps = hf["num_attention_heads"], first(hf, "rms_norm_eps", default=1e-6)
    head_dim = first(hf, "head_dim", default=hf["hidden_size"] // heads)
    bias = bool(hf.get("attention_bias", False))
    mixer = Attention(
        heads=heads,
        kv_heads=first(hf, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(hf, head_dim),
        qk_norm=Norm(eps=eps),
        bias=bias,
        out_bias=bias,
        window=hf.get("sliding_window") if hf.get("use_sliding_window") else None,
    )
    router = Router(
        experts=first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=128),
        experts_per_token=first(hf, "num_experts_per_tok", default=8),
        renormalize=bool(hf.get("norm_topk_prob", False)),
    )
    moe, dense = Moe(router, hf["moe_intermediate_size"]), Mlp(hf["intermediate_size"])
    step, only_dense = first(hf, "decoder_sparse_step", default=1), hf.get("mlp_only_layers") or []
    layers = [LayerSpec(mixer, dense if i in only_dense or (i + 1) % step else moe) for i in range(hf["num_hidden_layers"])]
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks(layers),
        norm=Norm(eps=eps),
        family="qwen3_moe",
        hf=json.dumps(hf, sort_keys=True),
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )
