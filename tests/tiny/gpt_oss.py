from tiny import BASE, LINEAR, YARN, Kind

_EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 10,
    "sliding_window": 4,
    "swiglu_limit": 1.0,
}
KINDS = {
    "GptOss": Kind(
        "gpt_oss",
        BASE | _EXPERTS | {"num_hidden_layers": 2},
        {"rope_parameters": YARN | {"truncate": False}},
    )
}
VARIANTS = {
    "gpt_oss-remainder-one_expert-mha-tied": (
        "GptOss",
        {
            "num_hidden_layers": 5,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss-layer_types-no_attention_bias-alpha": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "swiglu_alpha": 0.7,
            "num_key_value_heads": 1,
            "rope_parameters": LINEAR,
        },
    ),
}
WIDE = {
    "gpt_oss-all_experts-limit": (
        "GptOss",
        {"num_experts_per_tok": 8, "swiglu_limit": 0.2, "rope_parameters": YARN},
    ),
    "gpt_oss-four_experts-head_dim": (
        "GptOss",
        {"num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 4},
    ),
}
GENERATED = {"gpt_oss": ("GptOss", KINDS["GptOss"].standard)}
GENERATED_WIDE = {
    "gpt_oss-remainder-tied": ("GptOss", {"num_hidden_layers": 5, "tie_word_embeddings": True})
}
PUBLISHED = {"gpt-oss-20b": 20_914_757_184}
