"""Reads the fields of a Hugging Face configuration that many families share. Free of jax.

`hf` is always such a configuration with the defaults of its class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from policy.config import (
    Activation,
    Attention,
    DecoderConfig,
    GatedDeltaNet,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Mamba2,
    Norm,
    ProportionalScaling,
    Rope,
    Stack,
    YarnScaling,
    index_crosses_repeats,
)

# `hidden_act` of a configuration -> the name in policy.config.Mlp.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class UnsupportedModel(ValueError):
    """Raised for a configuration that the decoder does not compute."""


def wrong_value(hf: dict, error: Exception, reads: Callable[[dict], bool]) -> str:
    """Returns what to say of a configuration that cannot be read because of `error`.

    It names the key whose value is at fault: the first one with another value of which `reads`
    returns true. If no single key is, it says the error.
    """
    values = dict(_leaves(hf))
    lengths = {len(value) for value in values.values() if isinstance(value, list)}
    # Numbers that fit most keys; the number of layers is that of the entries of a list.
    for other in (64, 2, 1, *sorted(lengths - {64, 2, 1}), None):
        for path, value in values.items():
            if reads(_changed(hf, path, other)):
                return f"{'.'.join(path)}: {json.dumps(value)} cannot be used"
    return f"{hf.get('model_type')}: a value of the configuration has a wrong type or size: {error}"


def _leaves(hf: dict) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys, value) of all values of a configuration and its sections."""
    for key, value in hf.items():
        if isinstance(value, dict) and value:
            yield from (((key, *keys), inner) for keys, inner in _leaves(value))
        else:
            yield (key,), value


def _changed(hf: dict, keys: tuple[str, ...], value: object) -> dict:
    """Returns a configuration with another value under `keys`."""
    first_key, *rest = keys
    return hf | {first_key: _changed(hf[first_key], tuple(rest), value) if rest else value}


def first(hf: dict, *keys: str, default: Any = None) -> Any:
    """Returns the value of the first key that is present and not null, else `default`."""
    return next((hf[key] for key in keys if hf.get(key) is not None), default)


def activation(hf: dict, key: str = "hidden_act") -> Activation:
    """Returns the name in policy.config.Mlp of the activation under `key`. Raises UnsupportedModel
    for an unknown one."""
    if hf[key] not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{key} {hf[key]!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[hf[key]]


def head_dim(hf: dict) -> int:
    """Returns `head_dim`, by default the hidden size divided by the number of heads."""
    return first(hf, "head_dim", default=hf["hidden_size"] // hf["num_attention_heads"])


def attention(hf: dict, **features: Any) -> Attention:
    """Creates the attention that the common keys describe: scores divided by the root of the head
    dimension, by default as many key-value heads as heads and no biases. `features` are fields of
    Attention that add to these or replace them."""
    heads = hf["num_attention_heads"]
    dim = head_dim(hf)
    bias = bool(hf.get("attention_bias", False))
    common: dict[str, Any] = {
        "heads": heads,
        "kv_heads": first(hf, "num_key_value_heads", default=heads),
        "head_dim": dim,
        "scale": dim**-0.5,
        "bias": bias,
        "out_bias": bias,
    }
    return Attention(**common | features)


def layer_types(hf: dict, known: tuple[str, ...], derived: list[str]) -> list[str]:
    """Returns the kind of each layer: `layer_types` of the configuration, by default `derived`.
    Raises UnsupportedModel for a kind that is not in `known` or a wrong number of layers."""
    kinds = first(hf, "layer_types", default=derived)
    layers = hf["num_hidden_layers"]
    if len(kinds) != layers or (unknown := set(kinds) - set(known)):
        wrong = (
            f"{len(kinds)} entries for {layers} layers"
            if len(kinds) != layers
            else ", ".join(sorted(unknown))
        )
        raise UnsupportedModel(
            f"layer_types: {wrong}; known: {', '.join(known)}, one for each layer"
        )
    return list(kinds)


def layer_windows(hf: dict, derived: list[str]) -> list[int | None]:
    """Returns how many tokens the attention of each layer sees (None: all): `sliding_window` in
    layers of the kind sliding_attention, if `use_sliding_window` is true. `derived` are the kinds
    of the layers where the configuration has no `layer_types`."""
    kinds = layer_types(hf, ("full_attention", "sliding_attention"), derived)
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def windows_from_layer(hf: dict) -> list[int | None]:
    """Returns how many tokens the attention of each layer sees (None: all). By default the layers
    from `max_window_layers` on have the window."""
    derived = [
        "full_attention" if i < hf["max_window_layers"] else "sliding_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    return layer_windows(hf, derived)


def sparse_layers(hf: dict, experts: int) -> list[bool]:
    """Returns whether each layer has experts: every `decoder_sparse_step`-th layer, except
    `mlp_only_layers`."""
    step = hf["decoder_sparse_step"]
    dense = hf["mlp_only_layers"] or []
    return [
        experts > 0 and i not in dense and (i + 1) % step == 0
        for i in range(hf["num_hidden_layers"])
    ]


def rope_parameters(hf: dict, layer_type: str | None = None) -> dict:
    """Returns the rotary settings (of one layer type, if each has its own) as one dict with
    `rope_type`, `rope_theta`, `partial_rotary_factor` and `original_max_position_embeddings`.
    transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`, which wins
    if both are present, as in transformers.
    """
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    nested = [key for key, value in settings.items() if isinstance(value, dict)]
    if nested and layer_type is None:
        raise UnsupportedModel(
            f"rope_parameters.{nested[0]}: this family has one rotary embedding for all layers"
        )
    if nested:
        settings = dict(settings.get(layer_type) or {})
    settings["rope_type"] = first(settings, "rope_type", "type", default="default")
    settings["rope_theta"] = first(
        settings, "rope_theta", default=first(hf, "rope_theta", default=10000.0)
    )
    partial = first(
        settings, "partial_rotary_factor", default=first(hf, "partial_rotary_factor", default=1.0)
    )
    settings["partial_rotary_factor"] = float(partial)
    original = first(
        hf,
        "original_max_position_embeddings",
        default=settings.get("original_max_position_embeddings"),
    )
    settings["original_max_position_embeddings"] = (
        hf["max_position_embeddings"] if original is None else original
    )
    if settings["rope_type"] == "longrope":
        settings.setdefault("factor", None)
    if settings["rope_type"] in ("yarn", "longrope") and settings["factor"] is None:
        settings["factor"] = (
            hf["max_position_embeddings"] / settings["original_max_position_embeddings"]
        )
    return settings


def rope(hf: dict, dim: int, *, layer_type: str | None = None, interleaved: bool = False) -> Rope:
    """Creates the rotary embedding of heads of `dim` dimensions; `layer_type` is for families whose
    configuration has settings for each type. Raises UnsupportedModel if only a part of a head would
    rotate."""
    settings = rope_parameters(hf, layer_type)
    if settings["rope_type"] != "proportional" and settings["partial_rotary_factor"] != 1.0:
        raise UnsupportedModel(
            "partial_rotary_factor is not supported by this family: all of a head rotates"
        )
    return rope_from_settings(settings, dim, interleaved=interleaved)


def rope_by_sections(
    rope: Rope, hf: dict, default: tuple[int, int, int], *, blocks: bool = False
) -> Rope:
    """Adds the sections of `mrope_section` to a rotary embedding. Whether they are `blocks` or
    interleaved depends on the class, not on a key. Raises UnsupportedModel for blocks that do not
    cover all frequencies."""
    time, height, width = first(rope_parameters(hf), "mrope_section", default=default)
    if blocks and time + height + width != rope.dim // 2:
        raise UnsupportedModel(
            f"mrope_section {[time, height, width]}: the sum must be {rope.dim // 2}, half the "
            "rotated dimensions"
        )
    return replace(rope, sections=(int(time), int(height), int(width)), blocks=blocks)


def unwrapped(stored: dict) -> dict:
    """Returns the keys of the text model in a multimodal configuration, or the configuration of a
    text model as it is. The wrapper says whether the head is tied: transformers also writes the
    default of the text class, which no class reads."""
    inner = stored.get("text_config")
    if not isinstance(inner, dict):
        return stored
    return inner | {"tie_word_embeddings": first(stored, "tie_word_embeddings", default=False)}


def deepstack_layers(stored: dict, default: tuple[int, ...]) -> int:
    """Returns how many of the first layers receive features of the vision tower: as many as
    `deepstack_visual_indexes` of a multimodal configuration lists; 0 for a text model."""
    if "text_config" not in stored:
        return 0
    return len(
        first(stored.get("vision_config") or {}, "deepstack_visual_indexes", default=default)
    )


def rope_from_settings(s: dict, dim: int, *, interleaved: bool = False) -> Rope:
    """Creates the rotary embedding from the result of `rope_parameters`; `partial_rotary_factor` of
    a head rotates."""
    partial = s["partial_rotary_factor"]
    match s["rope_type"]:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(float(s["factor"]))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(s["factor"]),
                low_freq_factor=float(s["low_freq_factor"]),
                high_freq_factor=float(s["high_freq_factor"]),
                original_max_position=int(s["original_max_position_embeddings"]),
            )
        case "yarn":
            scaling = YarnScaling(
                factor=float(s["factor"]),
                original_max_position=int(s["original_max_position_embeddings"]),
                beta_fast=float(first(s, "beta_fast", default=32)),
                beta_slow=float(first(s, "beta_slow", default=1)),
                truncate=bool(first(s, "truncate", default=True)),
                attention_factor=yarn_attention_factor(s),
            )
        case "longrope":
            scaling = _longrope(s, int(dim * partial) // 2)
        case "proportional":
            scaling = ProportionalScaling(partial, float(first(s, "factor", default=1.0)))
            partial = 1.0
        case other:
            raise UnsupportedModel(
                f"rope_type {other!r} is not supported; known: default, linear, llama3, yarn, "
                "longrope, proportional"
            )
    return Rope(
        dim=int(dim * partial),
        theta=float(s["rope_theta"]),
        scaling=scaling,
        interleaved=interleaved,
    )


def _longrope(s: dict, pairs: int) -> LongRope:
    """Creates LongRoPE's scaling of so many pairs of dimensions."""
    for key in ("short_factor", "long_factor"):
        if len(s[key]) != pairs:
            raise UnsupportedModel(
                f"rope_parameters.{key}: {len(s[key])} numbers, expected {pairs}, one for each pair"
            )
    original = s["original_max_position_embeddings"]
    factor = float(s["factor"])
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(
        short=tuple(map(float, s["short_factor"])),
        long=tuple(map(float, s["long_factor"])),
        original_max_position=int(original),
        attention_factor=float(first(s, "attention_factor", default=attention_factor)),
    )


def hybrid_mixers(
    hf: dict, sections: tuple[int, int, int] | None = None
) -> list[Attention | GatedDeltaNet]:
    """Returns the mixer of each layer of a hybrid of gated delta nets (keys `linear_*`) and gated
    attention: every `full_attention_interval`-th layer attends, unless `layer_types` says
    otherwise. `sections`: the default of `mrope_section`; None: the family has no sections."""
    rotary = rope_from_settings(rope_parameters(hf), hf["head_dim"])
    gated = attention(
        hf,
        rope=rotary if sections is None else rope_by_sections(rotary, hf, sections),
        qk_norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        gate=True,
    )
    linear = GatedDeltaNet(
        key_heads=hf["linear_num_key_heads"],
        value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        conv_width=hf["linear_conv_kernel_dim"],
        norm=Norm(eps=hf["rms_norm_eps"]),
    )
    kinds = {"linear_attention": linear, "full_attention": gated}
    interval = hf["full_attention_interval"]
    derived = [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    return [kinds[kind] for kind in layer_types(hf, tuple(kinds), derived)]


def mamba2(hf: dict, channels: int, **features: Any) -> Mamba2:
    """Returns the Mamba-2 mixer of `channels` channels that the keys mamba_* describe. Raises
    UnsupportedModel if heads times their size are not `channels`, and for another activation than
    silu."""
    heads = hf["mamba_n_heads"]
    head_dim = hf["mamba_d_head"]
    head_dim = channels // heads if head_dim == "auto" else head_dim
    if heads * head_dim != channels:
        raise UnsupportedModel(
            f"mamba_d_head: {heads} heads of {head_dim} are not the {channels} channels of the "
            "mixer"
        )
    if activation(hf) != "silu":
        raise UnsupportedModel(
            f"hidden_act {hf['hidden_act']!r} is not supported in layers of Mamba-2, only 'silu'"
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=hf["mamba_n_groups"],
        state=hf["mamba_d_state"],
        conv_width=hf["mamba_d_conv"],
        conv_bias=bool(hf["mamba_conv_bias"]),
        bias=bool(hf["mamba_proj_bias"]),
        dt_limit=time_step_limit(hf),
        **features,
    )


def time_step_limit(hf: dict) -> tuple[float, float]:
    """Returns the limits of dt in Mamba-2, by default none. transformers writes infinity as
    {"__float__": "Infinity"}."""
    limits = first(hf, "time_step_limit", default=(0.0, "Infinity"))
    low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    return low, high


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Computes yarn's attention scale (arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(s: dict) -> float:
    """Returns the factor of cos and sin: the explicit value, else the ratio of the two mscales,
    else that for mscale 1."""
    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])
    factor = float(s["factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return yarn_mscale(factor, s["mscale"]) / yarn_mscale(factor, s["mscale_all_dim"])
    return yarn_mscale(factor)


def stacks(layers: list[LayerSpec]) -> tuple[Stack, ...]:
    """Groups layers into repeating patterns: at each place the pattern of at most 8 layers that
    covers most."""
    groups = []
    start = 0
    while start < len(layers):
        best = (1, 1)
        for period in range(1, 9):
            pattern = layers[start : start + period]
            repeats = 1
            while layers[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if index_crosses_repeats(pattern):
                continue
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        period, repeats = best
        groups.append(Stack(tuple(layers[start : start + period]), repeats))
        start += period * repeats
    return tuple(groups)


def decoder(
    family: str, stored: dict, hf: dict, layers: list[LayerSpec], **parts: Any
) -> DecoderConfig:
    """Creates the decoder of these layers. `stored` is the configuration as it is stored, `hf` the
    same with the defaults of its class; `parts` are further fields of DecoderConfig; the default
    `norm` is a plain one with `rms_norm_eps`."""
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks(layers),
        family=family,
        hf=json.dumps(stored, sort_keys=True),
        tied_head=bool(hf["tie_word_embeddings"]),
        initializer_range=hf["initializer_range"],
        **({} if "norm" in parts else {"norm": Norm(eps=hf["rms_norm_eps"])}),
        **parts,
    )
