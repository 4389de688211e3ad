from tiny import BASE, LINEAR, LLAMA3, YARN, Kind

_EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
}
_POSITIONS = {"attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.4, "head_dim": 8}
KINDS = {
    "Llama4": Kind(
        "llama4_text",
        BASE | _EXPERTS | _POSITIONS | {"num_hidden_layers": 4},
        {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "rope_parameters": LLAMA3},
        short={"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        config="Llama4TextConfig",
        padded={"attn_temperature_tuning": False},
    )
}
VARIANTS = {
    "llama4-scout": (
        "Llama4",
        {
            "head_dim": 10,
            "rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
    ),
    "llama4-maverick": (
        "Llama4",
        {
            "use_qk_norm": False,
            "interleave_moe_layer_step": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 6,
        },
    ),
    # Yarn's factor on cos and sin shows that queries and keys are normed after they are rotated.
    "llama4-lists-mha-tied-biases-untuned-yarn": (
        "Llama4",
        {
            "rope_parameters": YARN,
            "num_hidden_layers": 5,
            "moe_layers": [0, 3],
            "no_rope_layers": [0, 1, 1, 0, 1],
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attn_temperature_tuning": False,
        },
    ),
}
WIDE = {
    "llama4-all_experts": ("Llama4", {"num_experts_per_tok": 8, "rope_parameters": LINEAR}),
    "llama4-all_dense-gelu": (
        "Llama4",
        {"moe_layers": [], "hidden_act": "gelu", "num_hidden_layers": 3},
    ),
    "llama4-layer_types-apart-from-rope": (
        "Llama4",
        {
            "no_rope_layers": [1, 1, 0, 0],
            "layer_types": ["full_attention", "chunked_attention"] * 2,
            "rms_norm_eps": 1e-2,
        },
    ),
    "llama4-interval": (
        "Llama4",
        {"no_rope_layer_interval": 3, "num_hidden_layers": 7, "interleave_moe_layer_step": 3},
    ),
}
GENERATED = {"llama4": ("Llama4", KINDS["Llama4"].standard | KINDS["Llama4"].short)}
GENERATED_WIDE = {
    "llama4-maverick-shaped": VARIANTS["llama4-maverick"],
    "llama4-lists": VARIANTS["llama4-lists-mha-tied-biases-untuned-yarn"],
}
PUBLISHED = {"llama4-scout": 107_769_861_120, "llama4-maverick": 400_711_848_960}
