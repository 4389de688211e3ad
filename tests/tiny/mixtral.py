from tiny import BASE, LINEAR, YARN, Kind

_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
KINDS = {"Mixtral": Kind("mixtral", BASE | _EXPERTS, {"head_dim": 12, "sliding_window": 4})}
VARIANTS = {
    "mixtral-no_window-one_expert-tied": (
        "Mixtral",
        {
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": LINEAR,
        },
    ),
    "mixtral-mha-all_experts-gelu": (
        "Mixtral",
        {
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "hidden_act": "gelu",
            "num_hidden_layers": 2,
        },
    ),
}
WIDE = {
    # transformers scales by yarn only where the head dimension is written out
    "mixtral-four_experts-yarn": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": YARN},
    ),
    "mixtral-one_layer": (
        "Mixtral",
        {"num_hidden_layers": 1, "sliding_window": 1, "rms_norm_eps": 1e-2},
    ),
}
GENERATED = {"mixtral-window": ("Mixtral", KINDS["Mixtral"].standard | {"num_hidden_layers": 2})}
GENERATED_WIDE = {
    "mixtral-tied": ("Mixtral", {"tie_word_embeddings": True, "num_experts_per_tok": 2})
}
PUBLISHED = {"mixtral-8x7b": 46_702_792_704}
