from tiny import BASE, LINEAR, Kind

_SECTIONS = {
    "rope_parameters": BASE["rope_parameters"]
    | {"mrope_section": [3, 1, 1], "mrope_interleaved": True}
}


def text_class(library: str, name: str, part: str = "Text"):
    """A function that returns the text model of a multimodal class with a head, which transformers
    has only as a `part` of that class."""

    def oracle_class():
        import importlib

        import torch
        from transformers.generation import GenerationMixin
        from transformers.modeling_outputs import CausalLMOutputWithPast

        module = importlib.import_module(f"transformers.models.{library}.modeling_{library}")
        base, text = (
            getattr(module, f"{name}PreTrainedModel"),
            getattr(module, f"{name}{part}Model"),
        )
        config = getattr(importlib.import_module("transformers"), f"{name}TextConfig")

        class WithHead(base, GenerationMixin):
            config_class = config
            _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

            def __init__(self, config):
                super().__init__(config)
                self.model = text(config)
                self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
                self.post_init()
                self.generation_config.use_cache = False  # forward keeps no cache

            def forward(self, input_ids, **inputs):
                return CausalLMOutputWithPast(
                    logits=self.lm_head(self.model(input_ids, **inputs)[0])
                )

        return WithHead

    return oracle_class


# With text alone; tests/media_oracles.py has the models with pictures.
KINDS = {
    "Qwen3VL": Kind(
        "qwen3_vl_text",
        BASE | {"head_dim": 10} | _SECTIONS,
        {"tie_word_embeddings": True},
        config="Qwen3VLTextConfig",
        model="Qwen3VLForConditionalGeneration",
        oracle_class=text_class("qwen3_vl", "Qwen3VL"),
    )
}
VARIANTS = {
    "qwen3_vl-biases-untied": ("Qwen3VL", {"attention_bias": True, "rope_parameters": LINEAR})
}
PUBLISHED = {"qwen3-vl-2b": 1_720_574_976, "qwen3-vl-8b": 8_190_735_360}
