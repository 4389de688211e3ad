from tiny import BASE, Kind
from tiny.qwen3_vl import text_class

_SECTIONS = {
    "rope_parameters": BASE["rope_parameters"]
    | {"mrope_section": [3, 1, 1], "mrope_interleaved": True}
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 10}
# With text alone; tests/media_oracles.py has the models with pictures.
KINDS = {
    "Qwen3VLMoe": Kind(
        "qwen3_vl_moe_text",
        BASE | _EXPERTS | _SECTIONS,
        {"mlp_only_layers": [1]},
        config="Qwen3VLMoeTextConfig",
        model="Qwen3VLMoeForConditionalGeneration",
        oracle_class=text_class("qwen3_vl_moe", "Qwen3VLMoe"),
    )
}
VARIANTS = {
    "qwen3_vl_moe-sparse_step-untied": (
        "Qwen3VLMoe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": False,
            "num_experts_per_tok": 8,
        },
    )
}
PUBLISHED = {"qwen3-vl-30b-a3b": 30_532_122_624}
