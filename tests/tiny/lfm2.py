from tiny import BASE, LINEAR, YARN, Kind

_C, _F = "conv", "full_attention"
_BASE = BASE | {"num_hidden_layers": 4, "layer_types": [_C, _F, _C, _C], "block_multiple_of": 10}
KINDS = {
    "Lfm2": Kind(
        "lfm2",
        _BASE,
        {"conv_bias": True, "conv_L_cache": 4},
        logits=5e-5,  # products of three projections
        padded={"conv_bias": False},  # the class passes the bias of padding on
        short={"num_hidden_layers": 2, "layer_types": [_C, _F]},
    )
}
VARIANTS = {
    "lfm2-by_numbers-untied-odd_width": (
        "Lfm2",
        {
            "layer_types": None,
            "full_attn_idxs": [2],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "intermediate_size": 50,
        },
    ),
}
WIDE = {
    "lfm2-attention_alone-multiplied_width": (
        "Lfm2",
        {
            "layer_types": None,
            "num_hidden_layers": 2,
            "block_ffn_dim_multiplier": 1.3,
            "norm_eps": 1e-2,
        },
    ),
    "lfm2-one_convolution": (
        "Lfm2",
        {
            "layer_types": [_C],
            "num_hidden_layers": 1,
            "conv_L_cache": 2,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-mha-yarn": ("Lfm2", {"num_key_value_heads": 4, "rope_parameters": YARN, "head_dim": 12}),
    "lfm2-linear": ("Lfm2", {"rope_parameters": LINEAR, "conv_bias": True}),
}
GENERATED = {"lfm2": ("Lfm2", {"conv_bias": True})}
GENERATED_WIDE = {"lfm2-convolutions_alone": ("Lfm2", {"layer_types": [_C] * 4, "conv_L_cache": 5})}
