from tiny import BASE, LINEAR, LLAMA3, YARN, Kind

KINDS = {
    "Llama": Kind(
        "llama", BASE, {"head_dim": 12, "attention_bias": True, "rope_parameters": LLAMA3}
    )
}
VARIANTS = {
    "llama-mha-tied-mlp_bias-linear-gelu": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "rope_parameters": LINEAR,
            "hidden_act": "gelu",
        },
    ),
    "llama-mqa-one_layer": (
        "Llama",
        {"num_key_value_heads": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-2},
    ),
}
WIDE = {
    "llama-yarn-attention_factor": (
        "Llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 4}},
    ),
    "llama-yarn-plain": ("Llama", {"rope_parameters": YARN}),
    "llama-head_dim-larger": ("Llama", {"head_dim": 24, "num_hidden_layers": 2}),
    "llama-seven_layers-relu": ("Llama", {"num_hidden_layers": 7, "hidden_act": "relu"}),
    "llama-gelu_new": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
GENERATED = {
    "llama-mqa-tied": (
        "Llama",
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    )
}
GENERATED_WIDE = {
    "llama": ("Llama", KINDS["Llama"].standard),
    "llama-mha-mlp_bias": (
        "Llama",
        {"num_key_value_heads": 4, "mlp_bias": True, "hidden_act": "gelu"},
    ),
}
# SmolLM2 (arXiv 2502.02737): 135 million.
PUBLISHED = {"llama3.1-8b": 8_030_261_248, "smollm2-135m": 134_515_008}
