from tiny import BASE, LINEAR, Kind

# Scores and logits are as large as those of the other families: the embeddings' factor is undone by
# that of the logits.
_FACTORS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
}
KINDS = {"Granite": Kind("granite", BASE | _FACTORS, {"tie_word_embeddings": True})}
VARIANTS = {
    "granite-biases-mqa-head_dim": (
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 10},
    ),
}
WIDE = {
    "granite-defaults-mha": (
        "Granite",
        {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "num_key_value_heads": 4,
            "initializer_range": 0.1,
        },
    ),
    "granite-linear-gelu": (
        "Granite",
        {"rope_parameters": LINEAR, "hidden_act": "gelu", "logits_scaling": 0.7},
    ),
}
GENERATED = {"granite": ("Granite", {"num_hidden_layers": 2})}
GENERATED_WIDE = {"granite-tied": ("Granite", {"tie_word_embeddings": True, "logits_scaling": 3.0})}
