from tiny import BASE, Kind

_FACTORS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
}
KINDS = {
    "GraniteMoe": Kind(
        "granitemoe",
        BASE | _FACTORS | {"num_local_experts": 8, "num_experts_per_tok": 3},
        {"attention_bias": True},
    )
}
VARIANTS = {
    "granitemoe-one_expert-tied-mqa": (
        "GraniteMoe",
        {"num_experts_per_tok": 1, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
}
WIDE = {
    "granitemoe-two_experts-mha": (
        "GraniteMoe",
        {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    )
}
GENERATED = {"granitemoe": ("GraniteMoe", {"num_hidden_layers": 2})}
