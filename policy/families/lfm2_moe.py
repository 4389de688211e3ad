"""LFM2 with experts (Lfm2MoeForCausalLM): the mixers of lfm2; after some dense layers, experts
whose choice a bias corrects."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.families import lfm2
from policy.fields.config_fields import decoder
from policy.fields.names import Stored

ARCHITECTURES = ("Lfm2MoeForCausalLM",)
MODEL_TYPES = ("lfm2_moe",)
# As the class of transformers holds them: gates and up projections of all experts in one tensor.
_FUSED = Stored(
    "feed_forward.experts.gate_up_proj",
    "x f+ e -> x e f",
    parts=("expert_gate_proj", "expert_up_proj"),
)
NAMES = lfm2.NAMES | {
    "feed_forward.router.weight": Stored("feed_forward.gate.weight", "x e -> e x"),
    "feed_forward.router.correction_bias": Stored("feed_forward.expert_bias"),
    "feed_forward.expert_gate_proj": Stored(
        "feed_forward.experts.{e}.w1.weight", "f e -> e f", also=(_FUSED,)
    ),
    "feed_forward.expert_up_proj": Stored(
        "feed_forward.experts.{e}.w3.weight", "f e -> e f", also=(_FUSED,)
    ),
    "feed_forward.expert_down_proj": Stored(
        "feed_forward.experts.{e}.w2.weight",
        "e f -> f e",
        also=(Stored("feed_forward.experts.down_proj", "x e f -> x f e"),),
    ),
}
TOP = lfm2.TOP

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = lfm2.complete(DEFAULTS, stored)
    router = Router(
        experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        score="sigmoid",
        correction_bias=bool(hf["use_expert_bias"]),
        renormalize=bool(hf["norm_topk_prob"]),
        scale=hf["routed_scaling_factor"],
    )
    dense = Mlp(hf["intermediate_size"])
    experts = Moe(router, hf["moe_intermediate_size"])
    layers = [
        LayerSpec(mixer, dense if number < hf["num_dense_layers"] else experts)
        for number, mixer in enumerate(lfm2.mixers(hf, []))
    ]
    return decoder("lfm2_moe", stored, hf, layers, norm=Norm(hf["norm_eps"]))
