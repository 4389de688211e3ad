from tiny import BASE, Kind

_L, _F = "linear_attention", "full_attention"
# Small weights, as for the other gated delta nets.
_BASE = BASE | {
    "num_hidden_layers": 4,
    "layer_types": [_L, _F, _L, _L],
    "initializer_range": 0.1,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KINDS = {
    "OlmoHybrid": Kind(
        "olmo_hybrid",
        _BASE,
        {"attention_bias": True, "linear_conv_kernel_dim": 3},
        {"num_hidden_layers": 2, "layer_types": [_L, _F]},
        logits=1e-4,
        generator=5e-5,
    )
}
VARIANTS = {
    "olmo_hybrid-nope-positive-mqa-tied": (
        "OlmoHybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
}
WIDE = {
    "olmo_hybrid-one_key_head": (
        "OlmoHybrid",
        {
            "linear_num_key_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": [_F, _L, _F],
            "rms_norm_eps": 1e-2,
        },
    ),
}
GENERATED = {"olmo_hybrid": ("OlmoHybrid", {})}
