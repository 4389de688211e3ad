from tiny import BASE, LLAMA3, Kind


def oracle_class():
    """StableLM with root-mean-square norms."""
    from transformers import StableLmForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class ParallelRMS(StableLmForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.input_layernorm = LlamaRMSNorm(config.hidden_size, config.layer_norm_eps)
            self.model.norm = LlamaRMSNorm(config.hidden_size, config.layer_norm_eps)

    return ParallelRMS


_WHOLE = {"rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 1.0}, "use_parallel_residual": True}
KINDS = {
    "ParallelRMS": Kind(
        "stablelm",
        BASE | _WHOLE,
        config="StableLmConfig",
        model="ParallelRMS",
        oracle_class=oracle_class,
        bare={"use_parallel_residual": True},
    )
}
VARIANTS = {
    "default-biases-tied-gelu": ("ParallelRMS", {"use_qkv_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "default-mqa-partial-one_layer": (
        "ParallelRMS",
        {
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "layer_norm_eps": 1e-2,
            "rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
    ),
}
WIDE = {
    "default-mha-llama3-five_layers": (
        "ParallelRMS",
        {"num_key_value_heads": 4, "num_hidden_layers": 5, "rope_parameters": LLAMA3 | {"partial_rotary_factor": 1.0}},
    )
}
