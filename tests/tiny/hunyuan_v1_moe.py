from tiny import BASE, Kind

KINDS = {
    "HunYuanMoEV1": Kind(
        "hunyuan_v1_moe",
        BASE | {"head_dim": 10, "num_experts": 8, "moe_topk": 3},
        {"attention_bias": True},
    )
}
VARIANTS = {
    "hunyuan_v1_moe-biases-mqa-tied": (
        "HunYuanMoEV1",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "moe_topk": 1,
        },
    ),
}
WIDE = {
    "hunyuan_v1_moe-mha": (
        "HunYuanMoEV1",
        {"num_key_value_heads": 4, "head_dim": 8, "moe_topk": [3, 2, 3]},
    )
}
GENERATED = {"hunyuan_v1_moe": ("HunYuanMoEV1", {"num_hidden_layers": 2})}
