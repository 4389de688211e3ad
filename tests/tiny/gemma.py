from tiny import BASE, LINEAR, Kind

KINDS = {
    "Gemma": Kind(
        "gemma", BASE | {"num_key_value_heads": 1, "head_dim": 12}, {"hidden_act": "gelu"}
    )
}
VARIANTS = {
    "gemma-mha-biases-linear": (
        "Gemma",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "rope_parameters": LINEAR,
            "num_hidden_layers": 1,
        },
    ),
    "gemma-untied-groups-relu": (
        "Gemma",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "hidden_act": "relu",
            "rms_norm_eps": 1e-2,
        },
    ),
}
WIDE = {"gemma-five_layers-wide_head": ("Gemma", {"num_hidden_layers": 5, "head_dim": 20})}
GENERATED = {"gemma": ("Gemma", {"num_hidden_layers": 2})}
PUBLISHED = {"gemma-7b": 8_537_680_896}
