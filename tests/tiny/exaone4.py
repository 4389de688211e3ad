from tiny import BASE, LLAMA3, Kind

KINDS = {
    "Exaone4": Kind(
        "exaone4",
        BASE | {"num_hidden_layers": 5, "sliding_window": 5},
        {"sliding_window_pattern": 3, "head_dim": 10},
        short={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    )
}
VARIANTS = {
    "exaone4-no_window-tied-mqa": (
        "Exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
}
WIDE = {
    "exaone4-all_full-mha": (
        "Exaone4",
        {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_key_value_heads": 4},
    ),
}
GENERATED = {"exaone4": ("Exaone4", KINDS["Exaone4"].short)}
