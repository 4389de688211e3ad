from tiny import BASE, LLAMA3, Kind


def oracle_class():
    """StableLM with root-mean-square norms, and the tables and the ungated feed-forward that a
    configuration may ask for.
    """
    import torch
    from transformers import StableLmForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class ParallelRMS(StableLmForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.input_layernorm = LlamaRMSNorm(config.hidden_size, config.layer_norm_eps)
            self.model.norm = LlamaRMSNorm(config.hidden_size, config.layer_norm_eps)
            if getattr(config, "mlp_activations", None):
                for layer in self.model.layers:
                    layer.mlp = Ungated(layer.mlp)
            if length := getattr(config, "trainable_position_size", 0):
                self.model.embed_positions = torch.nn.Embedding(length, config.hidden_size)
                self.model.embed_tokens.register_forward_hook(
                    lambda module, inputs, out: out + self.tables(out.shape[1])
                )

        def tables(self, length):
            E = self.config.hidden_size
            wavelength = 10000.0 ** (torch.arange(E // 2) / (E // 2 - 1))
            angle = torch.arange(length)[:, None] / wavelength
            return self.model.embed_positions.weight[:length] + torch.cat(
                [angle.sin(), angle.cos()], dim=-1
            )

    class Ungated(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

        def forward(self, x):
            return self.down_proj(torch.relu(self.up_proj(x)))

    return ParallelRMS


_FULL_ROTARY = {
    "rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 1.0},
    "use_parallel_residual": True,
}
KINDS = {
    "ParallelRMS": Kind(
        "stablelm",
        BASE | _FULL_ROTARY,
        config="StableLmConfig",
        model="ParallelRMS",
        oracle_class=oracle_class,
        given={"use_parallel_residual": True},
    )
}
VARIANTS = {
    "default-tables-ungated": (
        "ParallelRMS",
        {
            "trainable_position_size": 80,
            "use_untrainable_positional_embedding": True,
            "mlp_activations": ["relu"],
        },
    ),
    "default-biases-tied-gelu": (
        "ParallelRMS",
        {"use_qkv_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
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
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "rope_parameters": LLAMA3 | {"partial_rotary_factor": 1.0},
        },
    )
}
