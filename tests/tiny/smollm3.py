from tiny import BASE, LINEAR, Kind

_WINDOW = {"use_sliding_window": True, "sliding_window": 5}
KINDS = {
    "SmolLM3": Kind(
        "smollm3",
        BASE,
        # No biases: without a rotary embedding the gradient of those of keys is 0 but for rounding.
        _WINDOW | {"num_hidden_layers": 5, "no_rope_layer_interval": 3},
        short={"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    )
}
VARIANTS = {
    "smollm3-head_dim-mqa-untied-biases": (
        "SmolLM3",
        {
            "head_dim": 10,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 4,
        },
    ),
}
WIDE = {
    "smollm3-layer_types": (
        "SmolLM3",
        _WINDOW
        | {
            "no_rope_layers": [0, 1, 1],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3-no_rope_anywhere": (
        "SmolLM3",
        {"no_rope_layers": [0, 0, 0], "num_key_value_heads": 4},
    ),
    "smollm3-unused_window-linear": (
        "SmolLM3",
        {"sliding_window": 4, "no_rope_layer_interval": 2, "rope_parameters": LINEAR},
    ),
}
GENERATED = {"smollm3": ("SmolLM3", KINDS["SmolLM3"].standard | KINDS["SmolLM3"].short)}
GENERATED_WIDE = {"smollm3-no_window": ("SmolLM3", {"num_key_value_heads": 1})}
# SmolLM3-3B: 3.08 billion on its model card.
PUBLISHED = {"smollm3-3b": 3_075_098_624}
