"""DeepSeek V2, V2-Lite, V3 and V3.1 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM): latent attention, and a dense prefix
followed by mixtures of experts."""

from __future__ import annotations

import json

from policy import names
from policy.config import DecoderConfig, LatentAttention, LayerSpec, Mlp, Moe, Norm, Router
from policy.hf import UnsupportedModel, first, rope, rope_parameters, stacks, yarn_mscale

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | {
        "mixer.q_a_proj": names.Linear("self_attn.q_a_proj.weight"),
        "mixer.q_a_layernorm.weight": names.Plain("self_attn.q_a_layernorm.weight"),
        "mixer.q_b_proj": names.Linear("self_attn.q_b_proj.weight"),
        "mixer.kv_a_proj": names.Linear("self_attn.kv_a_proj_with_mqa.weight"),
        "mixer.kv_a_layernorm.weight": names.Plain("self_attn.kv_a_layernorm.weight"),
        "mixer.kv_b_proj": names.Linear("self_attn.kv_b_proj.weight"),
        "feed_forward.router.bias": names.Plain("mlp.gate.e_score_correction_bias"),
        "feed_forward.shared.gate_proj": names.Linear("mlp.shared_experts.gate_proj.weight"),
        "feed_forward.shared.up_proj": names.Linear("mlp.shared_experts.up_proj.weight"),
        "feed_forward.shared.down_proj": names.Linear("mlp.shared_experts.down_proj.weight"),
    }
)
SKIP = (r".*rotary_emb\.inv_freq", r"model\.layers\.{num_hidden_layers}\..*")  # the latter: multi-token prediction


def read(hf: dict) -> DecoderConfig:
    if hf.get("attention_bias"):
        raise UnsupportedModel("deepseek: attention_bias is not supported")
    mixer = _mixer(hf)
    dense, moe = Mlp(hf["intermediate_size"]), _moe(hf)
    kinds = hf.get("mlp_layer_types") or [
        "dense" if i < first(hf, "first_k_dense_replace", default=0) else "sparse" for i in range(hf["num_hidden_layers"])
    ]
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks([LayerSpec(mixer, dense if kind == "dense" else moe) for kind in kinds]),
        norm=Norm(eps=first(hf, "rms_norm_eps", default=1e-6)),
        family="deepseek",
        hf=json.dumps(hf, sort_keys=True),
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )


def _mixer(hf: dict) -> LatentAttention:
    """The softmax scale grows by the square of yarn's mscale_all_dim; the latent norms use eps 1e-6 whatever rms_norm_eps is."""
    settings, nope, rotated = rope_parameters(hf), hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    scale = (nope + rotated) ** -0.5
    if settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= yarn_mscale(float(settings["factor"]), settings["mscale_all_dim"]) ** 2
    return LatentAttention(
        heads=hf["num_attention_heads"],
        q_lora_rank=hf.get("q_lora_rank"),
        kv_lora_rank=hf["kv_lora_rank"],
        nope_dim=nope,
        v_dim=hf["v_head_dim"],
        scale=scale,
        rope=rope(hf, rotated, interleaved=bool(first(hf, "rope_interleave", default=True))),
    )


def _moe(hf: dict) -> Moe:
    v3 = hf.get("model_type") == "deepseek_v3" or "DeepseekV3ForCausalLM" in (hf.get("architectures") or ())
    limited = v3 or hf.get("topk_method") == "group_limited_greedy"
    router = Router(
        experts=first(hf, "n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=hf["num_experts_per_tok"],
        score="sigmoid" if v3 else "softmax",
        correction_bias=v3,
        groups=first(hf, "n_group", default=1) if limited else 1,
        topk_groups=first(hf, "topk_group", default=1) if limited else 1,
        group_score="top2" if v3 else "max",
        renormalize=v3 and bool(hf.get("norm_topk_prob", True)),
        scale=float(first(hf, "routed_scaling_factor", default=1.0)),
    )
    width, shared = hf["moe_intermediate_size"], first(hf, "n_shared_experts", default=0)
    return Moe(router, width, shared=Mlp(width * shared) if shared else None)
