from tiny import BASE, LINEAR, YARN, Kind

_THETA = {"rope_type": "default", "rope_theta": 500000.0}
_SLIDING = {"rope_type": "default", "rope_theta": 20000.0}


def _rope(full: dict) -> dict:
    return {"rope_parameters": {"sliding_attention": _SLIDING, "full_attention": full}}


KINDS = {
    "Olmo3": Kind(
        "olmo3",
        BASE | _rope(_THETA) | {"num_hidden_layers": 4, "sliding_window": 4},
        _rope(YARN | {"attention_factor": 1.3}),
        short={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    )
}
VARIANTS = {
    "olmo3-remainder-mha-tied-biases": (
        "Olmo3",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "olmo3-layer_types-mqa-linear-head_dim": (
        "Olmo3",
        _rope(LINEAR)
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
            "head_dim": 12,
        },
    ),
}
WIDE = {
    "olmo3-eight_layers-gelu": (
        "Olmo3",
        {"num_hidden_layers": 8, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
    ),
    "olmo3-all_sliding": ("Olmo3", {"num_hidden_layers": 2}),
    "olmo3-all_full-yarn": (
        "Olmo3",
        _rope(YARN) | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ),
}
GENERATED = {"olmo3": ("Olmo3", KINDS["Olmo3"].standard | KINDS["Olmo3"].short)}
GENERATED_WIDE = {
    "olmo3-remainder": ("Olmo3", {"num_hidden_layers": 6, "tie_word_embeddings": True})
}
PUBLISHED = {"olmo3-7b": 7_298_011_136}
