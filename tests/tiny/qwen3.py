from tiny import BASE, LINEAR, YARN, Kind

_WINDOW = {"use_sliding_window": True, "sliding_window": 4}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS = {"Qwen3": Kind("qwen3", BASE | {"head_dim": 10}, {"tie_word_embeddings": True})}
VARIANTS = {
    "qwen3-sliding-biases": (
        "Qwen3",
        _WINDOW | {"num_hidden_layers": 4, "max_window_layers": 1, "attention_bias": True},
    ),
    "qwen3-layer_types-yarn": (
        "Qwen3",
        _WINDOW
        | {
            "num_hidden_layers": 5,
            "layer_types": [*_ALTERNATING["layer_types"], "sliding_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}
WIDE = {
    "qwen3-mha-untied-linear": ("Qwen3", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "qwen3-mqa-window-larger-than-row": (
        "Qwen3",
        {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 0,
        },
    ),
}
GENERATED = {"qwen3-window": ("Qwen3", _WINDOW | {"max_window_layers": 1})}
GENERATED_WIDE = {
    "qwen3-tied": ("Qwen3", KINDS["Qwen3"].standard),
    "qwen3-alternating": ("Qwen3", _WINDOW | _ALTERNATING | {"num_hidden_layers": 4}),
}
PUBLISHED = {"qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360}
