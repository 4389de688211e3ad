from tiny import BASE, YARN, Kind

_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
KINDS = {
    "Qwen2": Kind(
        "qwen2",
        BASE,
        _WINDOW | {"num_hidden_layers": 5, "tie_word_embeddings": True},
        short={"num_hidden_layers": 2, "max_window_layers": 1},
    )
}
VARIANTS = {
    "qwen2-head_dim-mqa-layer_types": (
        "Qwen2",
        {
            "head_dim": 10,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-mha-unused_window-yarn": (
        "Qwen2",
        {"num_key_value_heads": 4, "sliding_window": 4, "rope_parameters": YARN},
    ),
}
WIDE = {
    "qwen2-all_windows-gelu": (
        "Qwen2",
        _WINDOW | {"max_window_layers": 0, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
    ),
    "qwen2-one_layer": ("Qwen2", {"num_hidden_layers": 1}),
}
GENERATED = {"qwen2": ("Qwen2", KINDS["Qwen2"].standard | KINDS["Qwen2"].short)}
GENERATED_WIDE = {"qwen2-no_window": ("Qwen2", {"num_key_value_heads": 1})}
# Qwen2.5 (arXiv 2412.15115): 0.49, 1.54 and 7.61 billion.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
}
