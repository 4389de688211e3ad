from tiny import BASE, Kind

_EXPERTS = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 3,
}
KINDS = {
    "Ernie4_5_Moe": Kind(
        "ernie4_5_moe",
        BASE | _EXPERTS,
        {"num_hidden_layers": 5, "moe_layer_interval": 2},
        short={"num_hidden_layers": 2},
    )
}
VARIANTS = {
    "ernie4_5_moe-no_shared-mqa-untied": (
        "Ernie4_5_Moe",
        {"moe_num_shared_experts": 0, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
}
WIDE = {
    "ernie4_5_moe-all_sparse-one_expert": (
        "Ernie4_5_Moe",
        {
            "moe_layer_start_index": 0,
            "moe_k": 1,
            "moe_num_shared_experts": 1,
            "num_key_value_heads": 4,
        },
    ),
}
GENERATED = {
    "ernie4_5_moe": ("Ernie4_5_Moe", {"num_hidden_layers": 2, "tie_word_embeddings": False})
}
