from tiny import BASE, LINEAR, Kind

KINDS = {
    "MiniMaxM2": Kind(
        "minimax_m2",
        BASE | {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3},
        {"rotary_dim": 6},
    )
}
VARIANTS = {
    "minimax_m2-mqa-all_of_a_head-tied": (
        "MiniMaxM2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "num_experts_per_tok": 1},
    ),
}
WIDE = {
    "minimax_m2-mha-linear": (
        "MiniMaxM2",
        {"num_key_value_heads": 4, "rope_parameters": LINEAR, "head_dim": 8},
    ),
}
GENERATED = {"minimax_m2": ("MiniMaxM2", {"num_hidden_layers": 2, "rotary_dim": 4})}
