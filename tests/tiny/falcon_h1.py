from tiny import BASE, Kind

# Six heads of eight numbers in two groups, three heads a group, of a state of ten.
_BASE = BASE | {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.7, 0.4],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
}
_BIASES = {"attention_bias": True, "mlp_bias": True, "projectors_bias": True}
KINDS = {
    "FalconH1": Kind(
        "falcon_h1",
        _BASE,
        _FACTORS | {"mamba_proj_bias": True},
        required=(),
        padded={"mamba_proj_bias": False},  # the class passes the bias of padding on
    )
}
VARIANTS = {
    "falcon_h1-norm-biases-mqa": (
        "FalconH1",
        _FACTORS
        | _BIASES
        | {"mamba_rms_norm": True, "mamba_conv_bias": False, "num_key_value_heads": 1},
    ),
    "falcon_h1-norm_after_gate-one_group-tied": (
        "FalconH1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "tie_word_embeddings": True,
            "time_step_limit": [0.5, 2.0],
        },
    ),
}
WIDE = {
    "falcon_h1-expanded": (
        "FalconH1",
        _FACTORS | {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 4},
    ),
}
GENERATED = {"falcon_h1": ("FalconH1", _FACTORS)}
