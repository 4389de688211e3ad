"""Gemma 4, text model of the larger sizes: Gemma 3's pattern with a wider head on the full layers, keys that are values
there, and, in the sparse models, experts in parallel to the dense feed-forward of every layer."""

from __future__ import annotations

from typing import Any

from policy.config import (
    SANDWICH_NORM,
    Attention,
    DecoderConfig,
    DenseAndExperts,
    LayerSpec,
    Mlp,
    Moe,
    Norm,
    NormName,
    Router,
)
from policy.huggingface import names, tower_fields, tower_names
from policy.huggingface.config_fields import UnsupportedModel, activation, attention, decoder, first, layer_types, rope
from policy.huggingface.names import Stored

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
MODEL_TYPES = ("gemma4_text", "gemma4")
KINDS = ("full_attention", "sliding_attention")
_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
MULTIMODAL = (*((name, f"model.{name}") for name in _TOWERS), ("model.", "model.language_model."))
TOWERS = {"image": tower_names.POOLED_VISION, "audio": tower_names.CONFORMER}
_EXPERTS = "feed_forward.experts."
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.NORMS_BY_ROLE
    | names.moved(names.MLP, ("feed_forward.", "feed_forward.dense."))
    | names.joined(_EXPERTS, ("expert_gate_proj", "expert_up_proj"), "experts.gate_up_proj", "x f+ e -> x e f")
    | {
        "scalar": Stored("layer_scalar"),
        "feed_forward.dense_input_norm.weight": Stored("pre_feedforward_layernorm.weight"),
        "feed_forward.dense_output_norm.weight": Stored("post_feedforward_layernorm_1.weight"),
        "feed_forward.experts_input_norm.weight": Stored("pre_feedforward_layernorm_2.weight"),
        "feed_forward.experts_output_norm.weight": Stored("post_feedforward_layernorm_2.weight"),
        _EXPERTS + "expert_down_proj": Stored("experts.down_proj", "x e f -> x f e"),
        _EXPERTS + "router.weight": Stored("router.proj.weight", "x e -> e x"),
        _EXPERTS + "router.input_norm.weight": Stored("router.scale"),
        _EXPERTS + "router.expert_scale": Stored("router.per_expert_scale"),
    }
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder does not compute."""
    hf = DEFAULTS | stored
    _refuse(hf)
    derived = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(hf["num_hidden_layers"])]
    kinds = layer_types(hf, KINDS, derived)
    kinds[-1] = "full_attention"  # whatever the configuration says, as in transformers
    norm = Norm(hf["rms_norm_eps"], "before_cast")
    feed_forward = _feed_forward(hf, norm)
    norms: tuple[NormName, ...] = SANDWICH_NORM
    if isinstance(feed_forward, DenseAndExperts):  # whose parts have norms of their own
        norms = tuple(name for name in SANDWICH_NORM if name != "pre_feedforward_layernorm")
    mixers = [_mixer(hf, kind, heads) for kind, heads in zip(kinds, _head_shapes(hf, kinds), strict=True)]
    return decoder(
        "gemma4",
        stored,
        hf,
        [LayerSpec(mixer, feed_forward, norms, scalar=True) for mixer in mixers],
        norm=norm,
        embedding_scale=hf["hidden_size"] ** 0.5,
        logit_softcap=hf["final_logit_softcapping"],
    )


def _refuse(hf: dict) -> None:
    """Refuses the extra parts of the small models. `use_double_wide_mlp` widens only layers with shared keys."""
    reasons = {
        "hidden_size_per_layer_input": "embeddings of each layer",
        "num_kv_shared_layers": "keys and values shared between layers",
    }
    for key, meaning in reasons.items():
        if hf[key]:
            raise UnsupportedModel(f"gemma4: {key} {hf[key]!r}: {meaning} are not supported; it must be 0")
    if hf["use_bidirectional_attention"] == "all":
        raise UnsupportedModel("gemma4: use_bidirectional_attention 'all' is not supported: the decoder is causal")


def _head_shapes(hf: dict, kinds: list[str]) -> list[tuple[int, int]]:
    """Returns (key-value heads, head dimension) of each layer: by `per_layer_config` of newer files, or by the two keys
    for all full layers."""
    if hf.get("per_layer_config") is None:
        wide = first(hf, "num_global_key_value_heads", default=hf["num_key_value_heads"])
        full = (wide if hf["attention_k_eq_v"] else hf["num_key_value_heads"], hf["global_head_dim"])
        return [full if kind == "full_attention" else (hf["num_key_value_heads"], hf["head_dim"]) for kind in kinds]
    layers = {int(number): keys for number, keys in hf["per_layer_config"].items()}
    for number, keys in layers.items():
        if number not in range(len(kinds)) or (unknown := set(keys) - {"num_key_value_heads", "head_dim"}):
            wrong = (
                f"there are {len(kinds)} layers" if number not in range(len(kinds)) else f"{', '.join(sorted(unknown))}"
            )
            raise UnsupportedModel(f"gemma4: per_layer_config.{number}: {wrong}; known: num_key_value_heads, head_dim")
    own = [hf | layers.get(number, {}) for number in range(len(kinds))]
    return [(keys["num_key_value_heads"], keys["head_dim"]) for keys in own]


def _mixer(hf: dict, kind: str, shape: tuple[int, int]) -> Attention:
    """Creates the attention of one layer. Scores are not scaled, since queries and keys are normed."""
    sliding = kind == "sliding_attention"
    kv_heads, head_dim = shape
    settings = first(hf, "rope_parameters", default=ROPE)
    if not isinstance(settings.get(kind), dict):
        raise UnsupportedModel(f"gemma4: rope_parameters: expected settings for {kind}, got {', '.join(settings)}")
    own = settings[kind] | {"truncate": settings.get("truncate", True)}  # yarn's, at the level of the kinds
    return attention(
        hf,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=rope(hf | {"rope_parameters": own, "rope_scaling": None}, head_dim),
        qk_norm=Norm(hf["rms_norm_eps"], "before_cast"),
        v_norm=Norm(hf["rms_norm_eps"], "none"),
        values_are_keys=bool(hf["attention_k_eq_v"]) and not sliding,
        window=hf["sliding_window"] if sliding else None,
        looks_ahead=sliding and hf["use_bidirectional_attention"] == "vision",
    )


def _feed_forward(hf: dict, norm: Norm) -> Mlp | DenseAndExperts:
    act = activation(hf, "hidden_activation")
    dense = Mlp(hf["intermediate_size"], act)
    if not hf["enable_moe_block"]:
        return dense
    if absent := [key for key in ("num_experts", "top_k_experts", "moe_intermediate_size") if hf.get(key) is None]:
        raise UnsupportedModel(f"gemma4: enable_moe_block needs {', '.join(absent)}")
    router = Router(hf["num_experts"], hf["top_k_experts"], input_norm=norm, expert_scale=True)
    return DenseAndExperts(dense, Moe(router, hf["moe_intermediate_size"], activation=act), norm)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the towers of a complete configuration, which may lack one."""
    readers = {
        "vision_config": ("image", tower_fields.pooled_vision),
        "audio_config": ("audio", tower_fields.conformer),
    }
    return {field: read(stored[key]) for key, (field, read) in readers.items() if stored.get(key) is not None}
