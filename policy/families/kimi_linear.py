"""Kimi Linear (KimiLinearForCausalLM, arXiv 2510.26692): Kimi Delta Attention, between it latent
attention without a rotation, and DeepSeek V3's experts."""

from __future__ import annotations

from typing import Any

from policy.config import (
    DecoderConfig,
    KimiDeltaAttention,
    LatentAttention,
    LayerSpec,
    Mlp,
    Norm,
    Unrotated,
)
from policy.families import deepseek, mixtral
from policy.fields.config_fields import UnsupportedModel, activation, decoder, first, layer_types
from policy.fields.names import Stored

ARCHITECTURES = ("KimiLinearForCausalLM",)
MODEL_TYPES = ("kimi_linear",)
_DENSE = {
    f"Mlp.{part}_proj": Stored(
        f"mlp.{part}_proj.weight",
        layout,
        also=(Stored(f"block_sparse_moe.{part}_proj.weight", layout),),
    )
    for part, layout in (("gate", "f e -> e f"), ("up", "f e -> e f"), ("down", "e f -> f e"))
}
_DELTA = {
    **{
        f"{part}_conv": Stored(f"self_attn.{part}_conv1d.weight", "(h d) 1 w -> h d w")
        for part in "qkv"
    },
    # transformers 5 holds the gate "f" in a module of its own, whose names adapters have.
    **{
        f"{part}_proj": Stored(
            f"self_attn.{part}_proj.weight",
            layout,
            also=(Stored(f"self_attn.{module}{part}_proj.weight", layout),) if module else (),
        )
        for part, layout, module in (
            ("f_a", "d e -> e d", "forget_gate."),
            ("f_b", "(h d) r -> r h d", "forget_gate."),
            ("g_a", "d e -> e d", ""),
            ("g_b", "(h d) r -> r h d", ""),
        )
    },
    "b_proj": Stored("self_attn.b_proj.weight", "h e -> e h"),
    "A_log": Stored("self_attn.A_log", "1 1 h 1 -> h"),
    "dt_bias": Stored("self_attn.dt_bias", "(h d) -> h d"),
    "norm.weight": Stored("self_attn.o_norm.weight"),
}
_SHARED = {
    f"feed_forward.shared.{part}_proj": Stored(
        f"block_sparse_moe.shared_experts.{part}_proj.weight",
        layout,
        also=(Stored(f"mlp.shared_experts.{part}_proj.weight", layout),),
    )
    for part, layout in (("gate", "f e -> e f"), ("up", "f e -> e f"), ("down", "e f -> f e"))
}
NAMES = (
    deepseek.NAMES
    | mixtral.NAMES
    | _SHARED
    | _DENSE
    | {
        "feed_forward.router.correction_bias": Stored(
            "block_sparse_moe.gate.e_score_correction_bias"
        )
    }
    | {f"KimiDeltaAttention.{path}": stored for path, stored in _DELTA.items()}
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "layer_types": None,
    "linear_attn_config": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
# Keys of DeepSeek V3 -> the names of released files, which transformers reads as well, and the
# default.
_RENAMED = {
    "n_routed_experts": ("num_experts", 256),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "n_group": ("num_expert_group", 1),
    "norm_topk_prob": ("moe_renormalize", True),
}
# Keys of released files that transformers does not read, and the only value whose model the decoder
# computes.
_FIXED = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
}
LINEAR = "linear_attention"
FULL = "full_attention"


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    for key, value in _FIXED.items():
        if stored.get(key, value) != value:
            raise UnsupportedModel(
                f"{key} {stored[key]!r} is not supported by this family, only {value!r}"
            )
    hf = _complete(stored)
    mixers = {LINEAR: _delta(hf), FULL: _latent(hf)}
    dense = Mlp(hf["intermediate_size"], activation(hf))
    experts = deepseek.mixture(hf, v3=True)
    layers = [
        LayerSpec(mixers[kind], dense if is_dense else experts)
        for kind, is_dense in zip(_kinds(hf), deepseek.dense_layers(hf), strict=True)
    ]
    return decoder("kimi_linear", stored, hf, layers)


def _complete(stored: dict) -> dict:
    """Returns the configuration under the keys of DeepSeek V3."""
    hf: dict[str, Any] = DEFAULTS | stored
    for key, (released, default) in _RENAMED.items():
        hf[key] = first(
            stored,
            released,
            key,
            *(("num_local_experts",) if "routed" in key else ()),
            default=default,
        )
    return hf


def _kinds(hf: dict) -> list[str]:
    """Returns the kind of each layer: `layer_types`, else the numbers from 1 that
    `linear_attn_config` lists, else latent attention in every fourth layer."""
    layers = hf["num_hidden_layers"]
    section = hf["linear_attn_config"] or {}
    derived = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    if "full_attn_layers" in section and "kda_layers" in section:
        full = section["full_attn_layers"]
        linear = section["kda_layers"]
        if sorted([*full, *linear]) != list(range(1, layers + 1)):
            raise UnsupportedModel(
                "linear_attn_config: full_attn_layers and kda_layers together must have each of "
                f"the numbers 1 to {layers} once"
            )
        derived = [FULL if i + 1 in full else LINEAR for i in range(layers)]
    return layer_types(hf, (LINEAR, FULL), derived)


def _delta(hf: dict) -> KimiDeltaAttention:
    section = hf["linear_attn_config"] or {}
    return KimiDeltaAttention(
        heads=section.get("num_heads", hf["linear_num_heads"]),
        head_dim=section.get("head_dim", hf["linear_head_dim"]),
        conv_width=section.get("short_conv_kernel_size", hf["linear_conv_kernel_dim"]),
        norm=Norm(hf["rms_norm_eps"], "before_cast"),
    )


def _latent(hf: dict) -> LatentAttention:
    nope = hf["qk_nope_head_dim"]
    shared = hf["qk_rope_head_dim"]
    return LatentAttention(
        heads=hf["num_attention_heads"],
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        nope_dim=nope,
        v_dim=hf["v_head_dim"],
        scale=(nope + shared) ** -0.5,
        rope=Unrotated(shared),
        bias=bool(hf["attention_bias"]),
    )
