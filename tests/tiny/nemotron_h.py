from tiny import BASE, Kind

_M, _A = "linear_attention", "full_attention"
# transformers bounds the time step below by time_step_min, and takes its logarithm; released code
# does not bound it.
_BASE = {key: value for key, value in BASE.items() if key != "rope_parameters"} | {
    "head_dim": 10,
    "num_hidden_layers": 5,
    "layers_block_type": [_M, "moe", _A, "mlp", _M],
    "time_step_min": 1e-30,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}
KINDS = {
    "NemotronH": Kind(
        "nemotron_h",
        _BASE,
        {"moe_latent_size": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        short={"num_hidden_layers": 4, "layers_block_type": [_M, "moe", _A, "mlp"]},
        required=(),
    )
}
VARIANTS = {
    "nemotron_h-one_group-no_bias-mqa": (
        "NemotronH",
        {
            "n_groups": 1,
            "mamba_num_heads": 3,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "num_key_value_heads": 1,
        },
    ),
}
WIDE = {
    "nemotron_h-mamba_alone": (
        "NemotronH",
        {"num_hidden_layers": 3, "layers_block_type": [_M] * 3, "mamba_head_dim": 5},
    )
}
GENERATED = {"nemotron_h": ("NemotronH", {})}
