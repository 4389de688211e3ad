"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (Qwen2MoeForCausalLM): Qwen2 with experts and a gated shared
one."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Router
from policy.fields import names
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    first,
    head_dim,
    layer_windows,
    rope,
    sparse_layers,
)

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
MODEL_TYPES = ("qwen2_moe",)
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_expert.")
    )
    | {"feed_forward.shared_gate": names.Stored("mlp.shared_expert_gate.weight", "o e -> e o")}
)

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "qkv_bias": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
EXPERTS = 60


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    act = activation(hf)
    router = Router(
        experts=first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        renormalize=bool(hf["norm_topk_prob"]),
    )
    moe = Moe(
        router,
        hf["moe_intermediate_size"],
        shared=Mlp(hf["shared_expert_intermediate_size"], act),
        activation=act,
        shared_gate=True,
    )
    dense = Mlp(hf["intermediate_size"], act)
    rotary = rope(hf, head_dim(hf))
    bias = bool(hf["qkv_bias"])
    layers = [
        LayerSpec(
            attention(hf, rope=rotary, bias=bias, out_bias=False, window=window),
            moe if sparse else dense,
        )
        for window, sparse in zip(_windows(hf), sparse_layers(hf, router.experts), strict=True)
    ]
    return decoder("qwen2_moe", stored, hf, layers)


def _windows(hf: dict) -> list[int | None]:
    """Returns the window of each layer. By default every other layer before `max_window_layers` has
    it, which is the opposite of the dense family."""
    derived = [
        "sliding_attention" if i % 2 == 0 and i < hf["max_window_layers"] else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    return layer_windows(hf, derived)
