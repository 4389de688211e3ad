from tiny import Kind
from tiny.qwen3_next import HYBRID, ROTARY, SHORT, SPARSE

_LOOSE = {"logits": 1e-4, "generator": 5e-5}
_SECTIONS = {
    "rope_parameters": ROTARY["rope_parameters"]
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
}
KINDS = {
    "Qwen3_5": Kind(
        "qwen3_5_text", HYBRID | _SECTIONS, {}, SHORT, config="Qwen3_5TextConfig", **_LOOSE
    ),
    "Qwen3_5Moe": Kind(
        "qwen3_5_moe_text",
        HYBRID | SPARSE | _SECTIONS,
        {},
        SHORT,
        config="Qwen3_5MoeTextConfig",
        **_LOOSE,
    ),
}
VARIANTS = {
    "qwen3_5-one_key_head-five_layers-tied": (
        "Qwen3_5",
        {
            "num_hidden_layers": 5,
            "linear_num_key_heads": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe-ungrouped-biases": (
        "Qwen3_5Moe",
        {
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "num_experts_per_tok": 1,
            "linear_conv_kernel_dim": 3,
        },
    ),
}
WIDE = {
    "qwen3_5-interval-seven": (
        "Qwen3_5",
        {"num_hidden_layers": 7, "full_attention_interval": 3, "num_key_value_heads": 4},
    )
}
PUBLISHED = {"qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688}
