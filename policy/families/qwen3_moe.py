"""Qwen3 mixture of experts (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.fields import names
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    first,
    head_dim,
    rope,
    sparse_layers,
)

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = names.ATTENTION | names.MLP | names.MOE

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
EXPERTS = 128


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    mixer = attention(
        hf, rope=rope(hf, head_dim(hf)), qk_norm=Norm(eps=hf["rms_norm_eps"]), window=window
    )
    router = Router(
        experts=first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        renormalize=bool(hf["norm_topk_prob"]),
    )
    moe = Moe(router, hf["moe_intermediate_size"], activation=activation(hf))
    dense = Mlp(hf["intermediate_size"], activation(hf))
    layers = [
        LayerSpec(mixer, moe if sparse else dense) for sparse in sparse_layers(hf, router.experts)
    ]
    return decoder("qwen3_moe", stored, hf, layers)
