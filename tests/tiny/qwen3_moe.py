from tiny import BASE, LINEAR, Kind

_WINDOW = {"use_sliding_window": True, "sliding_window": 4}
KINDS = {
    "Qwen3Moe": Kind(
        "qwen3_moe",
        BASE
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 10},
        {"norm_topk_prob": True, "mlp_only_layers": [1]},
    )
}
VARIANTS = {
    "qwen3_moe-sparse_step-unnormalised": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "rope_parameters": LINEAR,
        },
    ),
    "qwen3_moe-all_moe-window-tied": (
        "Qwen3Moe",
        _WINDOW | {"tie_word_embeddings": True, "norm_topk_prob": True},
    ),
}
WIDE = {
    "qwen3_moe-all_dense": ("Qwen3Moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_moe-prefix-dense": ("Qwen3Moe", {"mlp_only_layers": [0], "num_hidden_layers": 6}),
    "qwen3_moe-one_expert": ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "qwen3_moe-all_experts": ("Qwen3Moe", {"num_experts_per_tok": 8}),
}
GENERATED = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_hidden_layers": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
    )
}
GENERATED_WIDE = {
    "qwen3_moe-window-tied": (
        "Qwen3Moe",
        _WINDOW | {"tie_word_embeddings": True, "norm_topk_prob": True},
    )
}
PUBLISHED = {"qwen3-30b-a3b": 30_532_122_624}
