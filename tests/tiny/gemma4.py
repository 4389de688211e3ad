from tiny import BASE, VOCAB, Kind

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000.0,
    },
}
_TEXT = BASE | {
    "num_hidden_layers": 6,
    # scores are not scaled, so that wide heads of random weights would see one token each
    "head_dim": 6,
    "global_head_dim": 12,
    "sliding_window": 4,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": _ROPE,
}
_MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_SHORT = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_PERIOD = ["sliding_attention"] * 3 + ["full_attention"]
# The small form: the last layer that keeps the keys of its kind is number 3 (full) and number 4
# (sliding). Heads and weights are smaller still, as rounding grows where layers look at the same
# keys again.
_SMALL = {
    "initializer_range": 0.1,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_hidden_layers": 8,
    "layer_types": _PERIOD * 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
# Two layers that keep the keys of their kind, and two that share them.
_TWO_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": _SHORT["layer_types"] * 2,
    "num_kv_shared_layers": 2,
}
_CLASS = {
    "short": _SHORT,
    "config": "Gemma4TextConfig",
    "model": "Gemma4ForCausalLM",
    "required": ("hidden_size", "intermediate_size", "num_hidden_layers"),
    "logits": 1e-4,  # unscaled scores: transformers itself is up to 5e-5 from its float64 self
}
KINDS = {
    "Gemma4": Kind("gemma4_text", _TEXT, _K_IS_V, **_CLASS),
    "Gemma4Moe": Kind("gemma4_text", _TEXT | _MOE, _K_IS_V, **_CLASS),
    "Gemma4Small": Kind(
        "gemma4_text",
        _TEXT | _SMALL,
        **_CLASS | {"short": _TWO_SHARED},
    ),
}
VARIANTS = {
    "gemma4-values-biases-last_layer_made_full": (
        "Gemma4",
        {
            "num_hidden_layers": 2,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-k_is_v-biases-uncapped-full_first": (
        "Gemma4",
        _K_IS_V
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "final_logit_softcapping": None,
            "num_global_key_value_heads": 4,
        },
    ),
    "gemma4_small-one_keeper_shared-narrow-biases-untied": (
        "Gemma4Small",
        {
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": VOCAB + 7,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4_moe-values-all_experts": (
        "Gemma4Moe",
        _SHORT | {"top_k_experts": 8, "num_key_value_heads": 4},
    ),
}
WIDE = {
    "gemma4-remainder": ("Gemma4", {"num_hidden_layers": 8}),
    "gemma4-default_ropes": ("Gemma4", {"rope_parameters": None, "num_hidden_layers": 7}),
    "gemma4-proportional_factor-half_turning": (
        "Gemma4",
        _SHORT
        | {
            "rope_parameters": _ROPE
            | {
                "full_attention": _ROPE["full_attention"]
                | {"partial_rotary_factor": 0.6, "factor": 3.0}
            },
            "global_head_dim": 20,
        },
    ),
    "gemma4_moe-one_expert-silu": (
        "Gemma4Moe",
        {
            "top_k_experts": 1,
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-2,
            "num_hidden_layers": 1,
        },
    ),
    "gemma4_small-embeddings_only": (
        "Gemma4Small",
        {"num_kv_shared_layers": 0, "num_hidden_layers": 4, "layer_types": _PERIOD},
    ),
    "gemma4_small-k_is_v": ("Gemma4Small", _TWO_SHARED | _K_IS_V),
    "gemma4_small-experts": ("Gemma4Small", _TWO_SHARED | _MOE),
    "gemma4_small-two_periods_shared": (
        "Gemma4Small",
        {"layer_types": _SHORT["layer_types"] * 4, "num_kv_shared_layers": 4},
    ),
    "gemma4_moe-two_patterns": ("Gemma4Moe", _K_IS_V | {"num_hidden_layers": 12}),
}
# A cap at which greedy tokens still differ in probability.
_CAP = {"final_logit_softcapping": 6.0}
GENERATED = {
    "gemma4": ("Gemma4", _SHORT | _K_IS_V | _CAP),
    "gemma4_moe": ("Gemma4Moe", _SHORT | _K_IS_V | _CAP),
    "gemma4_small": (
        "Gemma4Small",
        _CAP
        | {
            "num_hidden_layers": 6,
            "layer_types": _SHORT["layer_types"] * 3,
            "num_kv_shared_layers": 4,
        },
    ),
}
GENERATED_WIDE = {
    "gemma4-values-last_layer_made_full": (
        "Gemma4",
        _CAP | {"num_hidden_layers": 8, "num_global_key_value_heads": 1},
    ),
    "gemma4_moe-four_layers": (
        "Gemma4Moe",
        _CAP | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
PUBLISHED = {
    # The parameters, and a constant of each layer. The small sizes have 2.3 and 4.5 billion without
    # the table of the embeddings for each layer, as the model card says.
    "gemma4-26b-a4b": 25_233_141_760 + 30,
    "gemma4-e2b": 4_628_569_344 + 35,
    "gemma4-e4b": 7_463_013_376 + 42,
}
