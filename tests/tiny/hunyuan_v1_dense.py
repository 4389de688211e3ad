from tiny import BASE, Kind

_ALPHA = {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0, "rope_theta": 10000.0}
KINDS = {
    "HunYuanDenseV1": Kind(
        "hunyuan_v1_dense",
        BASE | {"head_dim": 10},
        {"attention_bias": True, "rope_parameters": _ALPHA},
    )
}
VARIANTS = {
    "hunyuan_v1_dense-mqa-tied": (
        "HunYuanDenseV1",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 8},
    ),
}
WIDE = {
    "hunyuan_v1_dense-mha-gelu": (
        "HunYuanDenseV1",
        {"num_key_value_heads": 4, "hidden_act": "gelu"},
    )
}
GENERATED = {"hunyuan_v1_dense": ("HunYuanDenseV1", {"num_hidden_layers": 2})}
