from tiny import BASE, LINEAR, Kind

KINDS = {"Glm4": Kind("glm4", BASE | {"head_dim": 12}, {"num_key_value_heads": 2})}
VARIANTS = {
    "glm4-no_biases-mqa-tied-three_quarters": (
        "Glm4",
        {
            "attention_bias": False,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "head_dim": 8,
            "rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 0.75},
        },
    ),
}
WIDE = {
    "glm4-mha-gelu-linear": (
        "Glm4",
        {
            "num_key_value_heads": 4,
            "hidden_act": "gelu",
            "rope_parameters": LINEAR,
            "rms_norm_eps": 1e-2,
        },
    ),
    "glm4-one_layer-all_of_a_head": (
        "Glm4",
        {
            "num_hidden_layers": 1,
            "rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 1.0},
        },
    ),
}
GENERATED = {"glm4": ("Glm4", {"num_hidden_layers": 2})}
GENERATED_WIDE = {"glm4-mqa": ("Glm4", {"num_hidden_layers": 2, "num_key_value_heads": 1})}
