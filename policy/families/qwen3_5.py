"""Qwen3.5, dense and mixture of experts (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM), and the text
model of the multimodal ones: three gated delta nets to one gated attention."""

from __future__ import annotations

from typing import Any

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.fields import names, tower_files
from policy.fields.config_fields import UnsupportedModel, activation, decoder, first, hybrid_mixers

ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
# The Hub stores the experts fused.
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | names.fused(names.MOE)
    | names.DELTA_NET
    | names.joined(
        "GatedDeltaNet.",
        ("q_proj", "k_proj", "v_proj"),
        "linear_attn.in_proj_qkv.weight",
        "(k d)+ e -> e k d",
    )
    | {
        f"GatedDeltaNet.{part}_proj": names.Stored(
            f"linear_attn.in_proj_{part}.weight", "(k d) e -> e k d"
        )
        for part in ("z", "b", "a")
    }
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_expert.")
    )
    | {"feed_forward.shared_gate": names.Stored("mlp.shared_expert_gate.weight", "o e -> e o")}
)

# The values of absent keys, by the classes of transformers.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DENSE = _DEFAULTS | {"num_key_value_heads": 4}
MOE = _DEFAULTS | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
}
EXPERTS = 256
SECTIONS = (11, 11, 10)
MULTIMODAL = (("visual.", "model.visual."), ("model.", "model.language_model."))
TOWERS = {"image": names.moved(tower_files.GRID_VISION, ("", ""), ("", "visual."))}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    named = [name for name in stored.get("architectures") or () if name in ARCHITECTURES]
    is_moe = "Moe" in named[0] if named else "moe" in stored["model_type"]
    hf = (MOE if is_moe else DENSE) | stored
    if hf.get("output_gate_type") not in (None, "swish", "silu"):
        raise UnsupportedModel(
            f"output_gate_type {hf['output_gate_type']!r} is not supported: the gated delta nets "
            "of this family have the gate 'swish'"
        )
    feed_forward = _experts(hf) if is_moe else Mlp(hf["intermediate_size"], activation(hf))
    layers = [LayerSpec(mixer, feed_forward) for mixer in hybrid_mixers(hf, SECTIONS)]
    return decoder("qwen3_5", stored, hf, layers, norm=Norm(hf["rms_norm_eps"], "zero_centred"))


def _experts(hf: dict) -> Moe:
    """Creates the experts. The weights of the chosen experts always sum to 1."""
    experts = first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=EXPERTS)
    act = activation(hf)
    shared = Mlp(hf["shared_expert_intermediate_size"], act)
    router = Router(experts, hf["num_experts_per_tok"])
    return Moe(router, hf["moe_intermediate_size"], shared=shared, activation=act, shared_gate=True)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {"image": tower_files.grid_vision(stored["vision_config"])}
