"""gpt-oss (GptOssForCausalLM, arXiv 2508.10925): attention with sinks, sliding in every other
layer, and experts with biases and a clamped activation. The released files are quantised in MXFP4
and are dequantised as they are read."""

from __future__ import annotations

from policy.config import ClampedSwiglu, DecoderConfig, LayerSpec, Moe, Norm, Router
from policy.fields import names
from policy.fields.config_fields import attention, decoder, first, head_dim, layer_types, rope
from policy.fields.names import Stored

ARCHITECTURES = ("GptOssForCausalLM",)
MODEL_TYPES = ("gpt_oss",)
NAMES = (
    names.ATTENTION
    | {
        "mixer.sinks": Stored("self_attn.sinks"),
        "feed_forward.router.weight": Stored("mlp.router.weight", "x e -> e x"),
        "feed_forward.router.bias": Stored("mlp.router.bias"),
        "feed_forward.expert_down_proj": Stored("mlp.experts.down_proj"),
        "feed_forward.expert_down_bias": Stored("mlp.experts.down_proj_bias"),
    }
    | names.joined(
        "feed_forward.",
        ("expert_gate_proj", "expert_up_proj"),
        "mlp.experts.gate_up_proj",
        "x e f* -> x e f",
    )
    | names.joined(
        "feed_forward.",
        ("expert_gate_bias", "expert_up_bias"),
        "mlp.experts.gate_up_proj_bias",
        "x f* -> x f",
    )
)

KINDS = ("sliding_attention", "full_attention")
# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = 128


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf.get("rope_parameters") is None:
        hf["rope_parameters"] = ROPE
    rotary = rope(hf, head_dim(hf))
    moe = _experts(hf)

    def layer(kind: str) -> LayerSpec:
        window = hf["sliding_window"] if kind == "sliding_attention" else None
        mixer = attention(hf, rope=rotary, window=window, sinks=True)
        return LayerSpec(mixer, moe)

    kinds = layer_types(hf, KINDS, [KINDS[i % 2] for i in range(hf["num_hidden_layers"])])
    norm = Norm(eps=hf["rms_norm_eps"], scale="before_cast")
    return decoder("gpt_oss", stored, hf, [layer(kind) for kind in kinds], norm=norm)


def _experts(hf: dict) -> Moe:
    """Creates the experts. The class of transformers has one activation, whatever `hidden_act` is.
    Its softmax over the chosen logits equals the softmax over all, renormalised."""
    router = Router(
        experts=first(hf, "num_local_experts", "num_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        bias=True,
    )
    clamp = ClampedSwiglu(limit=float(hf["swiglu_limit"]), alpha=float(hf["swiglu_alpha"]))
    return Moe(router, hf["intermediate_size"], bias=True, clamp=clamp)
