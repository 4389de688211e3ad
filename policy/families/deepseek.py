"""DeepSeek V2, V2-Lite, V3, V3.1 and V3.2 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM,
DeepseekV32ForCausalLM): latent attention, in V3.2 over keys that an indexer selects, and a dense
prefix followed by mixtures of experts. Kimi K2 has the layers of V3 and is also the text model
inside Kimi K2.5."""

from __future__ import annotations

from policy.config import DecoderConfig, Indexer, LatentAttention, LayerSpec, Mlp, Moe, Router
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    decoder,
    first,
    rope,
    rope_parameters,
    yarn_mscale,
)

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
MODEL_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
# The names that transformers gives to the text model inside Kimi K2.5.
PREFIXES = (("language_model.model.blocks.", "model.layers."),)
# Experts with a correction of their choice, and shared experts.
EXPERT_NAMES = (
    names.MOE
    | {"feed_forward.router.correction_bias": names.Stored("mlp.gate.e_score_correction_bias")}
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_experts.")
    )
)
NAMES = (
    names.ATTENTION
    | names.MLP
    | EXPERT_NAMES
    | {
        "mixer.q_a_proj": names.Stored("self_attn.q_a_proj.weight", "r e -> e r"),
        "mixer.q_a_layernorm.weight": names.Stored("self_attn.q_a_layernorm.weight"),
        "mixer.q_b_proj": names.Stored("self_attn.q_b_proj.weight", "(h d) r -> r h d"),
        "mixer.kv_a_proj": names.Stored("self_attn.kv_a_proj_with_mqa.weight", "c e -> e c"),
        "mixer.kv_a_layernorm.weight": names.Stored("self_attn.kv_a_layernorm.weight"),
        "mixer.kv_b_proj": names.Stored("self_attn.kv_b_proj.weight", "(h d) c -> c h d"),
        "mixer.q_a_bias": names.Stored("self_attn.q_a_proj.bias"),
        "mixer.kv_a_bias": names.Stored("self_attn.kv_a_proj_with_mqa.bias"),
        "mixer.indexer.wq_b": names.Stored("self_attn.indexer.wq_b.weight", "(h d) r -> r h d"),
        "mixer.indexer.wk": names.Stored("self_attn.indexer.wk.weight", "d e -> e d"),
        "mixer.indexer.k_norm.weight": names.Stored("self_attn.indexer.k_norm.weight"),
        "mixer.indexer.k_norm.bias": names.Stored("self_attn.indexer.k_norm.bias"),
        "mixer.indexer.weights_proj": names.Stored(
            "self_attn.indexer.weights_proj.weight", "h e -> e h"
        ),
    }
)
# Layers past num_hidden_layers predict further tokens; they are read only with
# multi_token_prediction.
SKIP_EXTRA_LAYERS = True
PASSED_OVER = r"model\.layers\.61\."
# The values of absent keys, by the classes of transformers.
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
DEFAULTS_V32 = DEFAULTS_V3 | {
    "max_position_embeddings": 163840,
    "mlp_layer_types": None,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
EXPERTS_V2 = 64
EXPERTS_V3 = 256
_VERSIONS = {
    "DeepseekV2ForCausalLM": DEFAULTS_V2,
    "deepseek_v2": DEFAULTS_V2,
    "DeepseekV3ForCausalLM": DEFAULTS_V3,
    "deepseek_v3": DEFAULTS_V3,
    "DeepseekV32ForCausalLM": DEFAULTS_V32,
    "deepseek_v32": DEFAULTS_V32,
}


def defaults(hf: dict) -> dict:
    """Returns the values of absent keys in the version of a configuration, by `architectures`
    first, `model_type` second."""
    for name in hf.get("architectures") or ():
        if name in ARCHITECTURES:
            return _VERSIONS[name]
    return _VERSIONS[hf["model_type"]]


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    if stored.get("model_type") in MODEL_TYPE_ALIASES:
        stored = stored | {"model_type": MODEL_TYPE_ALIASES[stored["model_type"]]}
    version = defaults(stored)
    hf = version | stored
    v3 = version is not DEFAULTS_V2
    if version is not DEFAULTS_V32:
        hf |= {"index_topk": None, "mlp_layer_types": None}
    return decoder("deepseek", stored, hf, layers(hf, v3))


def layers(hf: dict, v3: bool) -> list[LayerSpec]:
    """Creates the layers of a configuration that has every key of its version."""
    mixer = _mixer(hf, v3)
    dense = Mlp(hf["intermediate_size"], activation(hf), bias=not v3 and bool(hf["mlp_bias"]))
    experts = mixture(hf, v3)
    return [LayerSpec(mixer, dense if is_dense else experts) for is_dense in dense_layers(hf)]


def mixture(hf: dict, v3: bool) -> Moe:
    """Creates the mixture of experts of a configuration that has every key of its version."""
    bias = not v3 and bool(hf["mlp_bias"])
    default = EXPERTS_V3 if v3 else EXPERTS_V2
    experts = first(hf, "n_routed_experts", "num_local_experts", "num_experts", default=default)
    width = hf["moe_intermediate_size"]
    shared = hf["n_shared_experts"]
    return Moe(
        _router(hf, v3, experts),
        width,
        shared=Mlp(width * shared, activation(hf), bias=bias) if shared else None,
        activation=activation(hf),
    )


def dense_layers(hf: dict) -> list[bool]:
    """Returns whether each layer has a dense feed-forward: the first `first_k_dense_replace`, or by
    `mlp_layer_types`."""
    layers = hf["num_hidden_layers"]
    if not (kinds := hf.get("mlp_layer_types")):  # version 3.2 only
        return [i < hf["first_k_dense_replace"] for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise UnsupportedModel(
            f"mlp_layer_types: {kinds}; expected dense or sparse for each of the {layers} layers"
        )
    return [kind == "dense" for kind in kinds]


def _mixer(hf: dict, v3: bool) -> LatentAttention:
    """Creates latent attention. The softmax scale grows by the square of yarn's mscale_all_dim; the
    latent norms use eps 1e-6 whatever rms_norm_eps is."""
    settings = rope_parameters(hf)
    nope = hf["qk_nope_head_dim"]
    rotated = hf["qk_rope_head_dim"]
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
        indexer=_indexer(hf, rotated) if hf["index_topk"] else None,
    )


def _indexer(hf: dict, rotated: int) -> Indexer:
    """Creates the indexer. It rotates by halves, with the frequencies of the main path."""
    if hf["q_lora_rank"] is None:
        raise UnsupportedModel(
            "q_lora_rank: the indexer of version 3.2 reads the query latent, so it needs a rank"
        )
    return Indexer(hf["index_n_heads"], hf["index_head_dim"], hf["index_topk"], rope(hf, rotated))


def _router(hf: dict, v3: bool, experts: int) -> Router:
    if not v3 and hf["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {hf['topk_method']!r} is not supported; known: greedy, "
            "group_limited_greedy"
        )
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
    """Returns the stored tensors without elements."""
    return empty_shared_experts(defaults(hf) | hf)


def empty_shared_experts(hf: dict) -> dict[str, tuple[int, ...]]:
    """Returns the shared experts of width 0 that transformers has with `n_shared_experts` 0. `hf`
    has every key of its version."""
    shapes: dict[str, tuple[int, ...]] = {}
    if hf["n_shared_experts"] == 0:
        for n in (n for n, is_dense in enumerate(dense_layers(hf)) if not is_dense):
            prefix = names.LAYER_PREFIX.format(n=n) + "mlp.shared_experts."
            E = hf["hidden_size"]
            shapes |= {prefix + "gate_proj.weight": (0, E), prefix + "up_proj.weight": (0, E)}
            shapes[prefix + "down_proj.weight"] = (E, 0)
    return shapes
