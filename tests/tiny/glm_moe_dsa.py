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
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# Many index heads: where all relu terms are 0 the scores tie, and libraries choose different keys.
_INDEXED = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 16}
_F, _S = "full", "shared"
KINDS = {
    "GlmMoeDsa": Kind(
        "glm_moe_dsa",
        BASE | _LATENT | _INDEXED,
        {"attention_bias": True, "num_hidden_layers": 5, "indexer_types": [_F, _F, _S, _S, _F]},
        short={"num_hidden_layers": 2, "indexer_types": [_F, _S]},
    ),
}
VARIANTS = {
    "glm_moe_dsa-yarn-tied-layer_types": (
        "GlmMoeDsa",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "tie_word_embeddings": True,
            "index_head_dim": 12,
        },
    ),
    # The choice of an indexer stays in a repeat of two layers.
    "glm_moe_dsa-shared-repeats": (
        "GlmMoeDsa",
        {"num_hidden_layers": 4, "index_topk_pattern": "FSFS", "first_k_dense_replace": 0},
    ),
}
WIDE = {
    "glm_moe_dsa-one_indexer": (
        "GlmMoeDsa",
        {"num_hidden_layers": 4, "index_topk_pattern": "FSSS", "first_k_dense_replace": 3},
    ),
    "glm_moe_dsa-shared-across_kinds": (
        "GlmMoeDsa",
        {
            "num_hidden_layers": 5,
            "index_topk_pattern": "FSSFS",
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse", "sparse"],
        },
    ),
    "glm_moe_dsa-no_shared-topk-longer-than-row": (
        "GlmMoeDsa",
        {"index_topk": 100, "n_shared_experts": 0},
    ),
    "glm_moe_dsa-one_layer-groups": (
        "GlmMoeDsa",
        {
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "index_topk": 7,
        },
    ),
}
GENERATED = {"glm_moe_dsa": ("GlmMoeDsa", KINDS["GlmMoeDsa"].standard)}
GENERATED_WIDE = {
    "glm_moe_dsa-repeats": ("GlmMoeDsa", {"num_hidden_layers": 6, "index_topk_pattern": "FSFSFS"}),
    "glm_moe_dsa-no_sharing": ("GlmMoeDsa", {"num_hidden_layers": 2}),
}
