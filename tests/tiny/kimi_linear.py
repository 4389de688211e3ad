from tiny import BASE, Kind

_L, _F = "linear_attention", "full_attention"
_BASE = {key: value for key, value in BASE.items() if key != "rope_parameters"} | {
    "initializer_range": 0.1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "layer_types": [_L, _F, _L],
}
KINDS = {
    "KimiLinear": Kind(
        "kimi_linear",
        _BASE,
        {"rms_norm_eps": 1e-4},
        short={"num_hidden_layers": 2, "layer_types": [_L, _F]},
        logits=1e-4,
        generator=5e-5,
    )
}
VARIANTS = {
    "kimi_linear-released_keys": (
        "KimiLinear",
        {
            "layer_types": None,
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 2,
                "head_dim": 10,
                "short_conv_kernel_size": 2,
            },
            "first_k_dense_replace": 2,
        },
    ),
}
WIDE = {
    "kimi_linear-query_latent-biases-one_head": (
        "KimiLinear",
        {
            "q_lora_rank": 12,
            "attention_bias": True,
            "linear_num_heads": 1,
            "num_expert_group": 1,
            "topk_group": 1,
        },
    ),
    "kimi_linear-derived_types": ("KimiLinear", {"layer_types": None, "num_hidden_layers": 5}),
}
GENERATED = {"kimi_linear": ("KimiLinear", {})}
GENERATED_WIDE = {
    "kimi_linear-linear_alone": ("KimiLinear", {"layer_types": [_L] * 3, "linear_head_dim": 10})
}
