from tiny import BASE, YARN, Kind

_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_UNSCALED = YARN | {"llama_4_scaling_beta": 0.0}
KINDS = {
    "Ministral3": Kind(
        "ministral3",
        BASE | {"head_dim": 10, "rope_parameters": _YARN},
        {"sliding_window": 20},
    )
}
VARIANTS = {
    "ministral3-tied-mqa-no_window": (
        "Ministral3",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12},
    ),
    "ministral3-unscaled": (
        "Ministral3",
        {"rope_parameters": _UNSCALED, "num_key_value_heads": 4, "num_hidden_layers": 1},
    ),
}
WIDE = {
    "ministral3-attention_factor": (
        "Ministral3",
        {"rope_parameters": _YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, "sliding_window": 3},
    ),
}
GENERATED = {"ministral3": ("Ministral3", {"num_hidden_layers": 2, "sliding_window": 6})}
GENERATED_WIDE = {"ministral3-tied": ("Ministral3", {"tie_word_embeddings": True})}
