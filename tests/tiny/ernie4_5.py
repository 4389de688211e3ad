from tiny import BASE, LINEAR, Kind

KINDS = {"Ernie4_5": Kind("ernie4_5", BASE | {"head_dim": 10}, {"use_bias": True})}
VARIANTS = {
    "ernie4_5-untied-mqa": (
        "Ernie4_5",
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 12},
    ),
}
WIDE = {"ernie4_5-mha-linear": ("Ernie4_5", {"num_key_value_heads": 4, "rope_parameters": LINEAR})}
GENERATED = {"ernie4_5": ("Ernie4_5", {"num_hidden_layers": 2, "tie_word_embeddings": False})}
