from tiny import BASE, Kind


def _swapped(name, sizes):
    """A Llama whose layers multiply by matrices between these sizes."""
    import torch
    from transformers import LlamaForCausalLM

    class Matrices(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            widths = [getattr(config, size) for size in sizes]
            self.mats = torch.nn.ModuleList(
                torch.nn.Linear(a, b, bias=False)
                for a, b in zip(widths[:-1], widths[1:], strict=True)
            )

        def forward(self, hidden_states, **kwargs):
            for mat in self.mats:
                hidden_states = mat(hidden_states)
            return hidden_states

    def __init__(self, config):
        LlamaForCausalLM.__init__(self, config)
        self.model.layers = torch.nn.ModuleList(
            Matrices(config) for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    return type(name, (LlamaForCausalLM,), {"__init__": __init__})


def simple():
    return _swapped("SimpleLM", ("hidden_size", "hidden_size"))


def simple_mlp():
    return _swapped("SimpleMlpLM", ("hidden_size", "intermediate_size", "hidden_size"))


_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")
KINDS = {
    "Simple": Kind(
        "llama",
        BASE,
        config="LlamaConfig",
        model="SimpleLM",
        oracle_class=simple,
        required=_REQUIRED,
    ),
    "SimpleMlp": Kind(
        "llama",
        BASE,
        config="LlamaConfig",
        model="SimpleMlpLM",
        oracle_class=simple_mlp,
        required=_REQUIRED,
    ),
}
VARIANTS = {
    "simple-tied-one_layer": (
        "Simple",
        {"tie_word_embeddings": True, "num_hidden_layers": 1, "rms_norm_eps": 1e-2},
    ),
    "simple_mlp-wide-five_layers": ("SimpleMlp", {"intermediate_size": 70, "num_hidden_layers": 5}),
}
