from tiny import BASE, Kind

_C, _F = "conv", "full_attention"
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
}
_BASE = (
    BASE
    | _EXPERTS
    | {"num_hidden_layers": 4, "layer_types": [_C, _F, _C, _C], "routed_scaling_factor": 1.5}
)
KINDS = {
    "Lfm2Moe": Kind(
        "lfm2_moe",
        _BASE,
        {"conv_bias": True, "conv_L_cache": 4},
        logits=5e-5,  # products of three projections
        padded={"conv_bias": False},  # the class passes the bias of padding on
        short={"num_hidden_layers": 2, "layer_types": [_C, _F]},
        given={"num_hidden_layers": 2, "layer_types": [_C, _F]},
    )
}
VARIANTS = {
    "lfm2_moe-no_bias-mqa-untied": (
        "Lfm2Moe",
        {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "num_dense_layers": 2,
        },
    ),
}
WIDE = {
    "lfm2_moe-experts_alone-one_each": (
        "Lfm2Moe",
        {
            "num_dense_layers": 0,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 2,
            "layer_types": [_F, _C],
            "head_dim": 12,
        },
    ),
}
GENERATED = {"lfm2_moe": ("Lfm2Moe", {"conv_bias": True})}
