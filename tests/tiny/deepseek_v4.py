from tiny import BASE, YARN, Kind

_S, _H, _C = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
_BASE = {
    key: value
    for key, value in BASE.items()
    if key not in ("num_key_value_heads", "intermediate_size")
} | {
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.375,
    "q_lora_rank": 12,
    "sliding_window": 5,
    "o_groups": 2,
    "o_lora_rank": 10,
    "layer_types": [_S, _H, _C, _C],
    "compress_rates": {_C: 3, _H: 7},
    # Many index heads: where all relu terms are 0 the scores tie, and libraries choose different
    # entries.
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "swiglu_limit": 1.0,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "rope_parameters": {key: value for key, value in YARN.items() if key != "rope_theta"},
}
KINDS = {
    "DeepseekV4": Kind(
        "deepseek_v4",
        _BASE,
        {"rms_norm_eps": 1e-4, "hc_eps": 1e-3},
        short={
            "num_hidden_layers": 3,
            "layer_types": [_S, _H, _C],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
        required=(),
        padded={"layer_types": [_S] * 4},  # the class compresses padding, too
    ),
}
# The model cards have 284 and 1,600 billion; the files of the first hold 284,332,230,231 numbers
# that are trained. The others are here the correction biases and the tables of experts by token id.
PUBLISHED = {"deepseek-v4-flash": 284_334_567_511, "deepseek-v4-pro": 1_572_999_528_803}
_NESTED = {
    "main": {
        "rope_type": "linear",
        "rope_theta": 5000.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
    "compress": YARN | {"partial_rotary_factor": 0.25},
}
VARIANTS = {
    "deepseek_v4-two_ropes-all_hashed-tied": (
        "DeepseekV4",
        {
            "rope_parameters": _NESTED,
            "mlp_layer_types": ["hash_moe"] * 4,
            "tie_word_embeddings": True,
            "scoring_func": "sigmoid",
            "layer_types": [_C, _H, _S, _H],
        },
    ),
    "deepseek_v4-released_keys": (
        "DeepseekV4",
        {
            "layer_types": None,
            "compress_rates": None,
            "mlp_layer_types": None,
            "compress_ratios": [0, 4, 128, 4, 0],
            "num_hash_layers": 2,
            "qk_rope_head_dim": 4,
            "partial_rotary_factor": None,
        },
    ),
}
WIDE = {
    "deepseek_v4-derived_types-one_stream": (
        "DeepseekV4",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "num_hidden_layers": 5,
            "hc_mult": 1,
            "hc_sinkhorn_iters": 1,
            "o_groups": 1,
        },
    ),
    "deepseek_v4-topk_longer_than_row-one_head": (
        "DeepseekV4",
        {"index_topk": 100, "num_attention_heads": 1, "o_groups": 1, "num_experts_per_tok": 1},
    ),
}
GENERATED = {
    "deepseek_v4": ("DeepseekV4", KINDS["DeepseekV4"].standard | {"initializer_range": 0.2})
}
GENERATED_WIDE = {
    "deepseek_v4-repeats": (
        "DeepseekV4",
        {
            "num_hidden_layers": 6,
            "layer_types": [_H, _C] * 3,
            "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
            "index_topk": 2,
            "initializer_range": 0.2,
        },
    ),
}
