from tiny import BASE, Kind
from tiny.qwen3_vl import text_class

_SECTIONS = {
    "rope_parameters": BASE["rope_parameters"]
    | {"mrope_section": [3, 1, 1], "mrope_interleaved": True}
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 10}
# With text alone; tests/media_oracles.py has the model with pictures and sounds.
KINDS = {
    "Qwen3OmniMoeThinker": Kind(
        "qwen3_omni_moe_text",
        BASE | _EXPERTS | _SECTIONS,
        {"mlp_only_layers": [1]},
        given={"head_dim": 128},
        config="Qwen3OmniMoeTextConfig",
        model="Qwen3OmniMoeThinkerForConditionalGeneration",
        oracle_class=text_class("qwen3_omni_moe", "Qwen3OmniMoe", "ThinkerText"),
    )
}
VARIANTS = {
    "qwen3_omni-sparse_step-unnormalised-biases": (
        "Qwen3OmniMoeThinker",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    )
}
PUBLISHED = {"qwen3-omni-30b-a3b": 30_532_646_912}
