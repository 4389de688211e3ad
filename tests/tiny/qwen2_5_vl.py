from tiny import BASE, LINEAR, Kind
from tiny.qwen3_vl import text_class

_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
_SECTIONS = {"rope_parameters": BASE["rope_parameters"] | {"mrope_section": [2, 1, 1]}}

# With text alone.
KINDS = {
    "Qwen2_5_VL": Kind(
        "qwen2_5_vl_text",
        BASE | _SECTIONS,
        _WINDOW | {"num_hidden_layers": 5, "tie_word_embeddings": True},
        short={"num_hidden_layers": 2, "max_window_layers": 1},
        config="Qwen2_5_VLTextConfig",
        model="Qwen2_5_VLForConditionalGeneration",
        oracle_class=text_class("qwen2_5_vl", "Qwen2_5_VL"),
    )
}
VARIANTS = {
    "qwen2_5_vl-mqa-untied-linear": (
        "Qwen2_5_VL",
        {"num_key_value_heads": 1, "rope_parameters": LINEAR | {"mrope_section": [1, 1, 2]}},
    )
}
PUBLISHED = {"qwen2.5-vl-3b": 3_085_938_688, "qwen2.5-vl-7b": 7_615_616_512}
