from tiny import BASE, LINEAR, Kind

KINDS = {
    "Cohere2": Kind(
        "cohere2",
        BASE | {"num_hidden_layers": 5, "sliding_window": 5},
        {"sliding_window_pattern": 3, "logit_scale": 0.75},
        short={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    )
}
VARIANTS = {
    "cohere2-biases-mqa-untied": (
        "Cohere2",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "logit_scale": 1.5,
            "num_hidden_layers": 4,
        },
    ),
}
WIDE = {
    "cohere2-mha-linear": (
        "Cohere2",
        {
            "num_key_value_heads": 4,
            "rope_parameters": LINEAR,
            "logit_scale": 1.0,
            "layer_norm_eps": 1e-2,
        },
    ),
}
GENERATED = {
    "cohere2": (
        "Cohere2",
        KINDS["Cohere2"].short | {"logit_scale": 1.0, "tie_word_embeddings": False},
    )
}
