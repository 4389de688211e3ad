from tiny import BASE, LINEAR, YARN, Kind

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
    "first_k_dense_replace": 1,
}
# Many index heads: where all relu terms are 0 the scores tie, and libraries choose different keys.
_INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
KINDS = {
    "DeepseekV2": Kind(
        "deepseek_v2",
        BASE | _LATENT | {"n_shared_experts": 2, "routed_scaling_factor": 2.0},
        {"topk_method": "group_limited_greedy"},
        given={"num_experts_per_tok": 6},
    ),
    "DeepseekV3": Kind(
        "deepseek_v3",
        BASE | _LATENT | {"n_shared_experts": 1},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "DeepseekV32": Kind(
        "deepseek_v32",
        BASE | _LATENT | _INDEXED | {"n_shared_experts": 1},
        {"attention_bias": True},
    ),
}
VARIANTS = {
    "v32-yarn-layer_types": (
        "DeepseekV32",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "index_topk": 7,
            "index_head_dim": 12,
        },
    ),
    "v3-biases-tied": ("DeepseekV3", {"attention_bias": True, "tie_word_embeddings": True}),
    "v2-greedy-full_query": (
        "DeepseekV2",
        {
            "topk_method": "greedy",
            "q_lora_rank": None,
            "n_group": None,
            "topk_group": None,
            "mlp_bias": True,
        },
    ),
    "v2-yarn-mscales-tied": (
        "DeepseekV2",
        {
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "v3-one_group-unnormalised-two_shared": (
        "DeepseekV3",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "q_lora_rank": None,
        },
    ),
    "v3-all_moe-halves-linear-no_shared": (
        "DeepseekV3",
        {
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "rope_parameters": LINEAR | {"mscale_all_dim": 1.0},
            "n_shared_experts": 0,
        },
    ),
}
WIDE = {
    "v3-yarn-mscale-differs": (
        "DeepseekV3",
        {"num_hidden_layers": 5, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "v3-all_dense": ("DeepseekV3", {"first_k_dense_replace": 3}),
    "v2-no_shared-three_groups": (
        "DeepseekV2",
        {
            "n_shared_experts": 0,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
        },
    ),
    "v2-all_moe-yarn-attention_factor": (
        "DeepseekV2",
        {
            "first_k_dense_replace": 0,
            "rope_parameters": YARN | {"attention_factor": 0.8, "mscale_all_dim": 0.707},
        },
    ),
    "v3-yarn-attention_factor": (
        "DeepseekV3",
        {"rope_parameters": YARN | {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v3-two_dense-two_groups-eight_chosen": (
        "DeepseekV3",
        {
            "first_k_dense_replace": 2,
            "num_hidden_layers": 6,
            "n_group": 2,
            "topk_group": 2,
            "num_experts_per_tok": 8,
        },
    ),
}
_SHORT = {"num_hidden_layers": 2}
GENERATED = {
    "deepseek-v2-full_query": (
        "DeepseekV2",
        _SHORT
        | {"topk_method": "greedy", "q_lora_rank": None, "n_group": None, "topk_group": None},
    ),
    "deepseek-v3-groups-yarn": ("DeepseekV3", _SHORT | KINDS["DeepseekV3"].standard),
}
GENERATED_WIDE = {
    "deepseek-v2-groups": ("DeepseekV2", {"topk_method": "group_limited_greedy"}),
    "deepseek-v3-full_query-no_shared": (
        "DeepseekV3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 0},
    ),
    "deepseek-v3-all_moe-deep": (
        "DeepseekV3",
        {"first_k_dense_replace": 0, "num_hidden_layers": 5},
    ),
}
WIDE |= {
    "v2-biases-full_query": ("DeepseekV2", {"attention_bias": True, "q_lora_rank": None}),
    "v32-topk-longer-than-row": ("DeepseekV32", {"index_topk": 100, "n_shared_experts": 0}),
    "v32-one_dense-of-five": ("DeepseekV32", {"num_hidden_layers": 5, "index_topk": 11}),
}
PUBLISHED = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v3.2": 671_877_944_064,
}
