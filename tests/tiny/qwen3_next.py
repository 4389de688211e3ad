from tiny import BASE, YARN, Kind

# Small weights and key heads of 16: the gated norm divides by the size of its input, and with
# larger ones float32 itself is off by more than the tolerance.
HYBRID = BASE | {
    "num_hidden_layers": 4,
    "initializer_range": 0.1,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
ROTARY = {"rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 0.25}}
SHORT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_LOOSE = {"logits": 1e-4, "generator": 5e-5}
KINDS = {
    "Qwen3Next": Kind(
        "qwen3_next", HYBRID | SPARSE | ROTARY, {"mlp_only_layers": [1]}, SHORT, **_LOOSE
    )
}
VARIANTS = {
    "qwen3_next-one_key_head-five_layers": (
        "Qwen3Next",
        {
            "num_hidden_layers": 5,
            "linear_num_key_heads": 1,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next-ungrouped-types-tied": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
}
WIDE = {
    "qwen3_next-dense-interval": (
        "Qwen3Next",
        {"decoder_sparse_step": 5, "full_attention_interval": 2},
    ),
    "qwen3_next-wide_values": (
        "Qwen3Next",
        {"linear_value_head_dim": 24, "linear_num_key_heads": 4, "num_key_value_heads": 4},
    ),
}
PUBLISHED = {"qwen3-next-80b": 79_674_391_296}
