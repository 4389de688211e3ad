from tiny import BASE, YARN, Kind

_ROPE = BASE["rope_parameters"]
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
KINDS = {
    "Glm4Moe": Kind(
        "glm4_moe",
        BASE | _EXPERTS | {"head_dim": 12},
        {"use_qk_norm": True, "attention_bias": True},
        given={"head_dim": 128},
    )
}
VARIANTS = {
    "glm4_moe-two_dense-one_group-no_shared-mqa": (
        "Glm4Moe",
        {
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 0,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.75},
        },
    ),
}
WIDE = {
    "glm4_moe-no_dense-tied": (
        "Glm4Moe",
        {"first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "glm4_moe-yarn": (
        "Glm4Moe",
        {"use_qk_norm": True, "rope_parameters": YARN | {"partial_rotary_factor": 1.0}},
    ),
}
GENERATED = {"glm4_moe": ("Glm4Moe", {"num_hidden_layers": 2, "use_qk_norm": True})}
GENERATED_WIDE = {
    "glm4_moe-biases": ("Glm4Moe", {"attention_bias": True, "first_k_dense_replace": 0})
}
