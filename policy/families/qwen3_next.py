"""Qwen3-Next (Qwen3NextForCausalLM): three gated delta nets to one gated attention, mixtures of
experts with a gated shared one."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.fields import names
from policy.fields.config_fields import activation, decoder, first, hybrid_mixers, sparse_layers

ARCHITECTURES = ("Qwen3NextForCausalLM",)
MODEL_TYPES = ("qwen3_next",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | names.DELTA_NET
    | names.joined(
        "GatedDeltaNet.",
        ("q_proj", "k_proj", "v_proj", "z_proj"),
        "linear_attn.in_proj_qkvz.weight",
        "(k d+) e -> e k d",
    )
    | names.joined(
        "GatedDeltaNet.", ("b_proj", "a_proj"), "linear_attn.in_proj_ba.weight", "(k g+) e -> e k g"
    )
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_expert.")
    )
    | {"feed_forward.shared_gate": names.Stored("mlp.shared_expert_gate.weight", "o e -> e o")}
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 2,
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
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
EXPERTS = 512


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    router = Router(
        experts=first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        renormalize=bool(hf["norm_topk_prob"]),
    )
    act = activation(hf)
    shared = Mlp(hf["shared_expert_intermediate_size"], act)
    moe = Moe(router, hf["moe_intermediate_size"], shared=shared, activation=act, shared_gate=True)
    dense = Mlp(hf["intermediate_size"], act)
    sparse = sparse_layers(hf, router.experts)
    layers = [
        LayerSpec(mixer, moe if experts else dense)
        for mixer, experts in zip(hybrid_mixers(hf), sparse, strict=True)
    ]
    return decoder("qwen3_next", stored, hf, layers, norm=Norm(hf["rms_norm_eps"], "zero_centred"))
