from tiny import BASE, LINEAR, YARN, Kind

KINDS = {"Olmo2": Kind("olmo2", BASE, {"attention_bias": True, "num_key_value_heads": 1})}
VARIANTS = {
    "olmo2-mha-tied-head_dim": (
        "Olmo2",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 12},
    ),
}
WIDE = {
    "olmo2-yarn-gelu": (
        "Olmo2",
        {"rope_parameters": YARN, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
    ),
    "olmo2-one_layer-linear": ("Olmo2", {"num_hidden_layers": 1, "rope_parameters": LINEAR}),
}
GENERATED = {"olmo2": ("Olmo2", {"num_hidden_layers": 2, "num_key_value_heads": 4})}
GENERATED_WIDE = {"olmo2-tied": ("Olmo2", {"num_hidden_layers": 2, "tie_word_embeddings": True})}
