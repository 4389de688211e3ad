"""DeepSeek V2, V2-Lite, V3 and V3.1 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM): latent attention, and a dense
prefix followed by mixtures of experts."""

from __future__ import annotations

from policy import names
from policy.config import DecoderConfig, LatentAttention, LayerSpec, Mlp, Moe, Router
from policy.hf import UnsupportedModel, activation, decoder, first, rope, rope_parameters, yarn_mscale

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | {
        "mixer.q_a_proj": names.Stored("self_attn.q_a_proj.weight", "r e -> e r"),
        "mixer.q_a_layernorm.weight": names.Stored("self_attn.q_a_layernorm.weight"),
        "mixer.q_b_proj": names.Stored("self_attn.q_b_proj.weight", "(h d) r -> r h d"),
        "mixer.kv_a_proj": names.Stored("self_attn.kv_a_proj_with_mqa.weight", "c e -> e c"),
        "mixer.kv_a_layernorm.weight": names.Stored("self_attn.kv_a_layernorm.weight"),
        "mixer.kv_b_proj": names.Stored("self_attn.kv_b_proj.weight", "(h d) c -> c h d"),
        "feed_forward.router.correction_bias": names.Stored("mlp.gate.e_score_correction_bias"),
    }
    | names.moved(names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_experts."))
)
SKIP = (r".*rotary_emb\.inv_freq",)
SKIP_EXTRA_LAYERS = True  # those past num_hidden_layers predict further tokens, which the decoder does not do
# What a configuration that lacks a key means, by the classes of transformers.
_DEFAULTS = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS_V2 = _DEFAULTS | {
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "num_experts_per_tok": None,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
}
DEFAULTS_V3 = _DEFAULTS | {
    "max_position_embeddings": 4096,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
EXPERTS_V2, EXPERTS_V3 = 64, 256


def is_v3(hf: dict) -> bool:
    """Version 3 rather than 2: by `architectures` first, by `model_type` second."""
    named = [name for name in hf.get("architectures") or () if name in ARCHITECTURES]
    return named[0] == "DeepseekV3ForCausalLM" if named else hf.get("model_type") == "deepseek_v3"


def read(stored: dict) -> DecoderConfig:
    v3 = is_v3(stored)
    hf = (DEFAULTS_V3 if v3 else DEFAULTS_V2) | stored
    bias = not v3 and bool(hf["mlp_bias"])
    mixer, dense = _mixer(hf, v3), Mlp(hf["intermediate_size"], activation(hf), bias=bias)
    experts = first(hf, "n_routed_experts", "num_local_experts", "num_experts", default=EXPERTS_V3 if v3 else EXPERTS_V2)
    width, shared = hf["moe_intermediate_size"], hf["n_shared_experts"]
    moe = Moe(
        _router(hf, v3, experts),
        width,
        shared=Mlp(width * shared, activation(hf), bias=bias) if shared else None,
        activation=activation(hf),
    )
    prefix = hf["first_k_dense_replace"]
    return decoder("deepseek", stored, hf, [LayerSpec(mixer, dense if i < prefix else moe) for i in range(hf["num_hidden_layers"])])


def _mixer(hf: dict, v3: bool) -> LatentAttention:
    """The softmax scale grows by the square of yarn's mscale_all_dim; the latent norms use eps 1e-6 whatever
    rms_norm_eps is."""
    settings, nope, rotated = rope_parameters(hf), hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    scale = (nope + rotated) ** -0.5
    if settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= yarn_mscale(float(settings["factor"]), settings["mscale_all_dim"]) ** 2
    return LatentAttention(
        heads=hf["num_attention_heads"],
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        nope_dim=nope,
        v_dim=hf["v_head_dim"],
        scale=scale,
        rope=rope(hf, rotated, interleaved=not v3 or bool(hf["rope_interleave"])),
        bias=bool(hf["attention_bias"]),
    )


def _router(hf: dict, v3: bool, experts: int) -> Router:
    if not v3 and hf["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {hf['topk_method']!r} is not supported; known: greedy, group_limited_greedy")
    limited = v3 or hf["topk_method"] == "group_limited_greedy"
    return Router(
        experts=experts,
        experts_per_token=hf["num_experts_per_tok"],
        score="sigmoid" if v3 else "softmax",
        correction_bias=v3,
        groups=first(hf, "n_group", default=1) if limited else 1,
        topk_groups=first(hf, "topk_group", default=1) if limited else 1,
        group_score="top2" if v3 else "max",
        renormalize=v3 and bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
    )


def empty_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Stored tensors without elements: with `n_shared_experts` 0 transformers keeps shared experts of width 0."""
    found, E = {}, hf["hidden_size"]
    defaults = DEFAULTS_V3 if is_v3(hf) else DEFAULTS_V2
    if (defaults | hf)["n_shared_experts"] == 0:
        for n in range((defaults | hf)["first_k_dense_replace"], hf["num_hidden_layers"]):
            prefix = names.LAYER_PREFIX.format(n=n) + "mlp.shared_experts."
            found |= {prefix + "gate_proj.weight": (0, E), prefix + "up_proj.weight": (0, E)}
            found[prefix + "down_proj.weight"] = (E, 0)
    return found
