from tiny import BASE, Kind

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000.0,
    },
}
_SHORT = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS = {
    "Gemma4Unified": Kind(
        "gemma4_unified_text",
        BASE
        | {
            "num_hidden_layers": 6,
            "head_dim": 6,  # as in gemma4: scores are not scaled
            "global_head_dim": 12,
            "sliding_window": 4,
            "final_logit_softcapping": 3.0,
            "rope_parameters": _ROPE,
        },
        _K_IS_V,
        short=_SHORT,
        config="Gemma4UnifiedTextConfig",
        model="Gemma4UnifiedForCausalLM",
        required=("hidden_size", "intermediate_size", "num_hidden_layers"),
        logits=1e-4,  # unscaled scores
    )
}
VARIANTS = {
    "gemma4_unified-values-biases-untied-last_layer_made_full": (
        "Gemma4Unified",
        {
            "num_hidden_layers": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
    ),
}
WIDE = {
    "gemma4_unified-default_ropes-mqa": (
        "Gemma4Unified",
        _SHORT | {"rope_parameters": None, "num_key_value_heads": 1},
    )
}
GENERATED = {
    "gemma4_unified": ("Gemma4Unified", _SHORT | _K_IS_V | {"final_logit_softcapping": 6.0})
}
