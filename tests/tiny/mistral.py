from tiny import BASE, LINEAR, YARN, Kind

KINDS = {"Mistral": Kind("mistral", BASE, {"sliding_window": 4, "head_dim": 12})}
VARIANTS = {
    "mistral-no_window-mha-tied-linear": (
        "Mistral",
        {
            "sliding_window": None,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR,
        },
    ),
    "mistral-mqa-gelu-yarn": (
        "Mistral",
        {
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "hidden_act": "gelu",
            "rope_parameters": YARN,
        },
    ),
}
WIDE = {
    "mistral-window-of-one": (
        "Mistral",
        {"sliding_window": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-2},
    ),
    "mistral-window-larger-than-row": (
        "Mistral",
        {"sliding_window": 100, "head_dim": 6, "num_hidden_layers": 5},
    ),
}
GENERATED = {"mistral-window": ("Mistral", KINDS["Mistral"].standard | {"num_hidden_layers": 2})}
GENERATED_WIDE = {
    "mistral-no_window-tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True})
}
PUBLISHED = {"mistral-7b": 7_241_732_096}
