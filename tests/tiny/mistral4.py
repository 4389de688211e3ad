from tiny import BASE, YARN, Kind

_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
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
    "Mistral4": Kind(
        "mistral4",
        BASE | _LATENT | {"rope_parameters": _YARN},
        {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    )
}
VARIANTS = {
    "mistral4-unscaled-halves-full_query-tied": (
        "Mistral4",
        {
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.0},
            "rope_interleave": False,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
}
WIDE = {
    "mistral4-no_shared-unnormalised-mscale": (
        "Mistral4",
        {
            "n_shared_experts": 0,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _YARN | {"mscale_all_dim": 0.5},
        },
    ),
}
GENERATED = {"mistral4": ("Mistral4", {"num_hidden_layers": 2})}
GENERATED_WIDE = {
    "mistral4-full_query": ("Mistral4", {"q_lora_rank": None, "first_k_dense_replace": 1})
}
