"""Gemma 4, text model: Gemma 3's pattern with a wider head on the full layers. In the larger sizes
keys are values there, and the sparse models have experts in parallel to the dense feed-forward of
every layer. In the small sizes (E2B, E4B) every layer reads embeddings of its own, and the last
layers share the keys and values of earlier ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from policy.config import (
    SANDWICH_NORM,
    Attention,
    DecoderConfig,
    DenseAndExperts,
    LayerEmbedding,
    LayerSpec,
    Mlp,
    Moe,
    Norm,
    NormName,
    Router,
)
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    layer_types,
    rope,
)
from policy.fields.names import Stored

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
MODEL_TYPES = ("gemma4_text", "gemma4")
KINDS = ("full_attention", "sliding_attention")
_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
MULTIMODAL = (*((name, f"model.{name}") for name in _TOWERS), ("model.", "model.language_model."))
TOWERS = {"image": tower_files.POOLED_VISION, "audio": tower_files.CONFORMER}
_EXPERTS = "feed_forward.experts."
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.NORMS_BY_ROLE
    | names.moved(names.MLP, ("feed_forward.", "feed_forward.dense."))
    | names.joined(
        _EXPERTS, ("expert_gate_proj", "expert_up_proj"), "experts.gate_up_proj", "x f+ e -> x e f"
    )
    | {
        "scalar": Stored("layer_scalar"),
        "layer_embedding.gate": Stored("per_layer_input_gate.weight", "o i -> i o"),
        "layer_embedding.projection": Stored("per_layer_projection.weight", "o i -> i o"),
        "layer_embedding.norm.weight": Stored("post_per_layer_input_norm.weight"),
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
TOP = names.TOP | {
    "layer_embeddings.table": Stored("model.embed_tokens_per_layer.weight"),
    "layer_embeddings.projection": Stored(
        "model.per_layer_model_projection.weight", "(l n) e -> e l n"
    ),
    "layer_embeddings.norm.weight": Stored("model.per_layer_projection_norm.weight"),
}

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
    "vocab_size_per_layer_input": 262144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    return build("gemma4", stored, DEFAULTS | stored)


def build(family: str, stored: dict, hf: dict) -> DecoderConfig:
    """Creates the decoder of `stored`; `hf` is the same with the defaults of the family's class."""
    _refuse(hf)
    derived = [
        "sliding_attention" if (i + 1) % 6 else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    kinds = layer_types(hf, KINDS, derived)
    kinds[-1] = "full_attention"  # whatever the configuration says, as in transformers
    norm = Norm(hf["rms_norm_eps"], "before_cast")
    feed_forward = _feed_forward(hf, norm)
    norms: tuple[NormName, ...] = SANDWICH_NORM
    if isinstance(feed_forward, DenseAndExperts):  # whose parts have norms of their own
        norms = tuple(name for name in SANDWICH_NORM if name != "pre_feedforward_layernorm")
    mixers = [
        _mixer(hf, kind, heads) for kind, heads in zip(kinds, _head_shapes(hf, kinds), strict=True)
    ]
    layer = LayerSpec(None, feed_forward, norms, scalar=True, layer_embedding=_layer_embedding(hf))
    return decoder(
        family,
        stored,
        hf,
        [_layer(hf, layer, mixer) for mixer in _with_shared_keys(hf, kinds, mixers)],
        norm=norm,
        embedding_scale=hf["hidden_size"] ** 0.5,
        logit_softcap=hf["final_logit_softcapping"],
    )


def unread(config: DecoderConfig) -> tuple[str, ...]:
    """Returns patterns of stored tensors that are not read: released files hold keys and values of
    layers that share those of others, and transformers passes over them too."""
    numbers = [str(number) for number, spec in enumerate(config.layers) if spec.shares is not None]
    prefix = re.escape(names.LAYER_PREFIX).replace(r"\{n\}", f"({'|'.join(numbers)})")
    return (rf"{prefix}self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if numbers else ()


def _refuse(hf: dict) -> None:
    if hf["use_bidirectional_attention"] == "all":
        raise UnsupportedModel(
            "gemma4: use_bidirectional_attention 'all' is not supported: the decoder is causal"
        )


def _head_shapes(hf: dict, kinds: list[str]) -> list[tuple[int, int]]:
    """Returns (key-value heads, head dimension) of each layer: by `per_layer_config` of newer
    files, or by the two keys for all full layers."""
    if hf.get("per_layer_config") is None:
        wide = first(hf, "num_global_key_value_heads", default=hf["num_key_value_heads"])
        full = (
            wide if hf["attention_k_eq_v"] else hf["num_key_value_heads"],
            hf["global_head_dim"],
        )
        return [
            full if kind == "full_attention" else (hf["num_key_value_heads"], hf["head_dim"])
            for kind in kinds
        ]
    layers = {int(number): keys for number, keys in hf["per_layer_config"].items()}
    for number, keys in layers.items():
        if number not in range(len(kinds)) or (
            unknown := set(keys) - {"num_key_value_heads", "head_dim"}
        ):
            wrong = (
                f"there are {len(kinds)} layers"
                if number not in range(len(kinds))
                else f"{', '.join(sorted(unknown))}"
            )
            raise UnsupportedModel(
                f"gemma4: per_layer_config.{number}: {wrong}; known: num_key_value_heads, head_dim"
            )
    own = [hf | layers.get(number, {}) for number in range(len(kinds))]
    return [(keys["num_key_value_heads"], keys["head_dim"]) for keys in own]


def _mixer(hf: dict, kind: str, shape: tuple[int, int]) -> Attention:
    """Creates the attention of one layer. Scores are not scaled, since queries and keys are
    normed."""
    sliding = kind == "sliding_attention"
    kv_heads, head_dim = shape
    settings = first(hf, "rope_parameters", default=ROPE)
    if not isinstance(settings.get(kind), dict):
        raise UnsupportedModel(
            f"gemma4: rope_parameters: expected settings for {kind}, got {', '.join(settings)}"
        )
    own = settings[kind] | {
        "truncate": settings.get("truncate", True)
    }  # yarn's, at the level of the kinds
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


def _with_shared_keys(hf: dict, kinds: list[str], mixers: list[Attention]) -> list[Attention]:
    """Returns the mixers with names for shared keys: each of the last `num_kv_shared_layers` layers
    shares the keys of the last layer of its kind before all of these."""
    sharers = hf["num_kv_shared_layers"]
    if not 0 <= sharers < len(kinds):
        raise UnsupportedModel(
            f"gemma4: num_kv_shared_layers {sharers}: it must be from 0 to {len(kinds) - 1}"
        )
    own = len(kinds) - sharers
    if absent := set(kinds[own:]) - set(kinds[:own]):
        raise UnsupportedModel(
            f"gemma4: num_kv_shared_layers {sharers}: no {min(absent)} layer comes before the "
            f"last {sharers} layers"
        )
    keepers = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds[own:])}
    result = list(mixers)
    for kind, number in keepers.items():
        result[number] = replace(mixers[number], keeps=kind)
    for number in range(own, len(kinds)):
        if mixers[number] != (keeper := mixers[keepers[kinds[number]]]):
            shapes = " and ".join(
                f"{each.kv_heads} heads of {each.head_dim}" for each in (keeper, mixers[number])
            )
            raise UnsupportedModel(
                f"gemma4: layer {number} cannot share keys and values of another shape: {shapes}"
            )
        result[number] = replace(mixers[number], shares=kinds[number])
    return result


def _layer(hf: dict, layer: LayerSpec, mixer: Attention) -> LayerSpec:
    """Returns `layer` with this mixer. `use_double_wide_mlp` widens only layers with shared
    keys."""
    dense = layer.feed_forward
    if not (mixer.shares and hf["use_double_wide_mlp"]):
        return replace(layer, mixer=mixer)
    if isinstance(dense, DenseAndExperts):
        return replace(layer, mixer=mixer, feed_forward=replace(dense, dense=_wide(dense.dense)))
    assert isinstance(dense, Mlp)
    return replace(layer, mixer=mixer, feed_forward=_wide(dense))


def _wide(mlp: Mlp) -> Mlp:
    return replace(mlp, width=2 * mlp.width)


def _layer_embedding(hf: dict) -> LayerEmbedding | None:
    if not hf["hidden_size_per_layer_input"]:
        return None
    rows = hf["vocab_size_per_layer_input"]
    needed = hf["vocab_size"]
    if rows < needed:
        raise UnsupportedModel(
            f"gemma4: vocab_size_per_layer_input {rows}: it must be at least vocab_size, "
            f"{needed}, since every token looks up a row"
        )
    return LayerEmbedding(
        hf["hidden_size_per_layer_input"], rows, activation(hf, "hidden_activation")
    )


def _feed_forward(hf: dict, norm: Norm) -> Mlp | DenseAndExperts:
    act = activation(hf, "hidden_activation")
    dense = Mlp(hf["intermediate_size"], act)
    if not hf["enable_moe_block"]:
        return dense
    if absent := [
        key
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
        if hf.get(key) is None
    ]:
        raise UnsupportedModel(f"gemma4: enable_moe_block needs {', '.join(absent)}")
    router = Router(hf["num_experts"], hf["top_k_experts"], input_norm=norm, expert_scale=True)
    return DenseAndExperts(dense, Moe(router, hf["moe_intermediate_size"], activation=act), norm)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the towers of a complete configuration, which may lack one."""
    readers = {
        "vision_config": ("image", tower_files.pooled_vision),
        "audio_config": ("audio", tower_files.conformer),
    }
    return {
        field: read(stored[key])
        for key, (field, read) in readers.items()
        if stored.get(key) is not None
    }
