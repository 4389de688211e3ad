from tiny import BASE, Kind

_HALF = BASE["rope_parameters"] | {"partial_rotary_factor": 0.5}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 4.0, 9.0],
}
_LONGROPE = {"rope_parameters": _LONG, "original_max_position_embeddings": 16}
# With the short factors in every test: where a sequence grows past the limit transformers mixes the
# two sets, since it keeps the keys that it has.
_SHORT_FACTORS = _LONGROPE | {"original_max_position_embeddings": 110}
KINDS = {
    "Phi3": Kind(
        "phi3",
        # Smaller weights: LongRoPE's attention factor makes scores larger, which amplifies
        # rounding.
        BASE
        | {
            "hidden_size": 48,
            "initializer_range": 0.15,
            "partial_rotary_factor": 0.5,
            "rope_parameters": _HALF,
        },
        _SHORT_FACTORS | {"tie_word_embeddings": True},
    )
}
VARIANTS = {
    "phi3-longrope-both_sets": ("Phi3", _LONGROPE),
    "phi3-window-all_of_a_head-mqa": (
        "Phi3",
        {
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 1.0,
            "rope_parameters": BASE["rope_parameters"],
        },
    ),
}
WIDE = {
    "phi3-mha-half-gelu": (
        "Phi3",
        {"num_key_value_heads": 4, "hidden_act": "gelu", "sliding_window": 1000},
    ),
    "phi3-longrope-attention_factor": (
        "Phi3",
        _LONGROPE | {"rope_parameters": _LONG | {"attention_factor": 1.4}, "num_hidden_layers": 1},
    ),
    "phi3-longrope-factor": ("Phi3", _LONGROPE | {"rope_parameters": _LONG | {"factor": 3.0}}),
}
GENERATED = {"phi3": ("Phi3", _SHORT_FACTORS | {"num_hidden_layers": 2})}
GENERATED_WIDE = {"phi3-window": ("Phi3", {"num_hidden_layers": 2, "sliding_window": 7})}
# Phi-4-mini (arXiv 2503.01743): 3.8 billion.
PUBLISHED = {"phi-4-mini": 3_836_021_760}
