from tiny import BASE, LINEAR, Kind

# Caps and windows so small that they bite within 12 tokens.
KINDS = {
    "Gemma2": Kind(
        "gemma2",
        BASE
        | {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    )
}
VARIANTS = {
    "gemma2-uncapped-biases-odd_layers": (
        "Gemma2",
        {
            "num_hidden_layers": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "gemma2-layer_types-untied-linear": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": LINEAR,
            "num_key_value_heads": 1,
        },
    ),
}
WIDE = {
    "gemma2-one_layer": (
        "Gemma2",
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-2, "query_pre_attn_scalar": 144},
    ),
    "gemma2-window_of_one-silu": (
        "Gemma2",
        {"sliding_window": 1, "hidden_activation": "silu", "head_dim": 8},
    ),
    "gemma2-window_larger_than_row": ("Gemma2", {"sliding_window": 100, "num_hidden_layers": 6}),
}
# A cap at which greedy tokens still differ in probability.
_CAP = {"final_logit_softcapping": 8.0}
GENERATED = {"gemma2": ("Gemma2", _CAP | {"num_hidden_layers": 2})}
GENERATED_WIDE = {
    "gemma2-odd_layers-untied": (
        "Gemma2",
        _CAP | {"num_hidden_layers": 5, "tie_word_embeddings": False},
    )
}
PUBLISHED = {"gemma2-9b": 9_241_705_984}
