from tiny import BASE, LINEAR, YARN, Kind

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": LINEAR | {"rope_theta": 1000.0},
}
# The standard model has a remainder of two sliding layers after a full pattern.
KINDS = {
    "Gemma3": Kind(
        "gemma3_text",
        BASE
        | {
            "num_hidden_layers": 6,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "rope_parameters": _ROPE,
        },
        {"num_hidden_layers": 8, "final_logit_softcapping": 3.0},
        short={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        config="Gemma3TextConfig",
        required=("hidden_size", "intermediate_size", "num_hidden_layers"),
    )
}
VARIANTS = {
    "gemma3-layer_types-untied-biases-attention_cap": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": 2.0,
            "num_key_value_heads": 1,
        },
    ),
    "gemma3-default_ropes-five_layers": (
        "Gemma3",
        {"num_hidden_layers": 5, "rope_parameters": None, "num_key_value_heads": 4, "head_dim": 8},
    ),
}
WIDE = {
    "gemma3-two_patterns": ("Gemma3", {"num_hidden_layers": 12}),
    "gemma3-pattern_of_two-yarn": (
        "Gemma3",
        {
            "num_hidden_layers": 5,
            "sliding_window_pattern": 2,
            "rope_parameters": _ROPE | {"full_attention": YARN | {"rope_theta": 500.0}},
        },
    ),
    "gemma3-all_sliding-silu": (
        "Gemma3",
        {
            "num_hidden_layers": 2,
            "sliding_window": 1,
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-2,
        },
    ),
}
GENERATED = {"gemma3": ("Gemma3", KINDS["Gemma3"].short)}
GENERATED_WIDE = {
    "gemma3-remainder": ("Gemma3", {"num_hidden_layers": 8, "final_logit_softcapping": 6.0})
}
PUBLISHED = {"gemma3-4b": 3_880_263_168, "gemma3-27b": 27_009_346_304}
