from tiny import BASE, Kind

_M, _A = "linear_attention", "full_attention"
# Six heads of eight numbers in two groups, three heads a group, of a state of ten.
_BASE = BASE | {
    "hidden_size": 24,
    "layer_types": [_M, _A, _M],
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "shared_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
_DENSE = {"num_local_experts": 0, "mamba_conv_bias": False, "mamba_proj_bias": True}
KINDS = {
    "GraniteMoeHybrid": Kind(
        "granitemoehybrid",
        _BASE,
        {"position_embedding_type": "rope", "mamba_proj_bias": True, "time_step_limit": [0.5, 2.0]},
        short={"num_hidden_layers": 2, "layer_types": [_M, _A]},
        padded={"mamba_proj_bias": False},  # the class passes the bias of padding on
    )
}
VARIANTS = {
    "granitemoehybrid-nope-dense": ("GraniteMoeHybrid", _DENSE),
    "granitemoehybrid-one_group-tied-mqa": (
        "GraniteMoeHybrid",
        {
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
}
WIDE = {
    "granitemoehybrid-mamba_alone-dense": (
        "GraniteMoeHybrid",
        {
            "layer_types": [_M] * 3,
            "num_local_experts": 0,
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_d_head": "auto",
            "mamba_n_groups": 4,
        },
    ),
    "granitemoehybrid-attention_alone": (
        "GraniteMoeHybrid",
        {"layer_types": [_A] * 3, "position_embedding_type": "rope", "num_local_experts": 0},
    ),
}
GENERATED = {"granitemoehybrid": ("GraniteMoeHybrid", _DENSE)}
