from tiny import BASE, LINEAR, Kind

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
KINDS = {
    "Qwen2Moe": Kind(
        "qwen2_moe",
        BASE | _EXPERTS,
        _WINDOW | {"num_hidden_layers": 5, "mlp_only_layers": [1]},
        short={"num_hidden_layers": 2},
    )
}
VARIANTS = {
    "qwen2_moe-sparse_step-normalised-unbiased": (
        "Qwen2Moe",
        {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2},
    ),
    "qwen2_moe-layer_types-tied-linear": (
        "Qwen2Moe",
        _WINDOW
        | {
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR,
        },
    ),
}
WIDE = {
    "qwen2_moe-all_dense": ("Qwen2Moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen2_moe-one_expert-head_dim": ("Qwen2Moe", {"num_experts_per_tok": 1, "head_dim": 10}),
}
GENERATED = {"qwen2_moe": ("Qwen2Moe", KINDS["Qwen2Moe"].standard | KINDS["Qwen2Moe"].short)}
GENERATED_WIDE = {"qwen2_moe-no_window": ("Qwen2Moe", {"norm_topk_prob": True})}
