from tiny import BASE, YARN, Kind

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}
KINDS = {
    "Glm4MoeLite": Kind(
        "glm4_moe_lite",
        BASE | _LATENT,
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        short={"num_hidden_layers": 2, "mlp_layer_types": None},
    )
}
VARIANTS = {
    "glm4_moe_lite-halves-full_query-biases-tied": (
        "Glm4MoeLite",
        {
            "rope_interleave": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
WIDE = {
    "glm4_moe_lite-no_shared-unnormalised": (
        "Glm4MoeLite",
        {"n_shared_experts": 0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite-yarn": (
        "Glm4MoeLite",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
}
GENERATED = {"glm4_moe_lite": ("Glm4MoeLite", {"num_hidden_layers": 2})}
GENERATED_WIDE = {"glm4_moe_lite-full_query": ("Glm4MoeLite", {"q_lora_rank": None})}
# GLM-4.7-Flash has 31.2 billion parameters on its model card, which counts the layer that predicts
# further tokens.
PUBLISHED = {"glm-4.7-flash": 29_943_393_920}
