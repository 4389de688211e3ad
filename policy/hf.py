"""Parts of a Hugging Face configuration that many families share, read into ours. Free of jax."""

from __future__ import annotations

import json
import math

from policy.config import DecoderConfig, LayerSpec, LinearScaling, Llama3Scaling, Norm, Rope, Stack, YarnScaling

# `hidden_act` of a configuration -> the name of policy.config.Mlp.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class UnsupportedModel(ValueError):
    """A configuration that asks for something the decoder does not compute."""


def first(hf: dict, *keys: str, default=None):
    """The value of the first key that is there and not null."""
    return next((hf[key] for key in keys if hf.get(key) is not None), default)


def activation(hf: dict) -> str:
    """The name in policy.config.Mlp of the configuration's `hidden_act`."""
    name = hf["hidden_act"]
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def rope_parameters(hf: dict) -> dict:
    """The rotary settings as one dict with `rope_type`, `rope_theta` and `original_max_position_embeddings`:
    transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`, which wins where both are
    there, as in transformers.
    """
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    for key, value in settings.items():
        if isinstance(value, dict):
            raise UnsupportedModel(f"rope_parameters.{key}: rotary settings for each layer type are not supported")
    settings["rope_type"] = first(settings, "rope_type", "type", default="default")
    settings["rope_theta"] = first(settings, "rope_theta", default=first(hf, "rope_theta", default=10000.0))
    if first(settings, "partial_rotary_factor", default=first(hf, "partial_rotary_factor", default=1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported: all of a head rotates")
    original = first(hf, "original_max_position_embeddings", default=settings.get("original_max_position_embeddings"))
    settings["original_max_position_embeddings"] = hf["max_position_embeddings"] if original is None else original
    if settings["rope_type"] == "yarn" and settings["factor"] is None:
        settings["factor"] = hf["max_position_embeddings"] / settings["original_max_position_embeddings"]
    return settings


def rope(hf: dict, dim: int, *, interleaved: bool = False) -> Rope:
    """The rotary embedding over `dim` dimensions that this configuration asks for."""
    s = rope_parameters(hf)
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
        case other:
            raise UnsupportedModel(f"rope_type {other!r} is not supported; known: default, linear, llama3, yarn")
    return Rope(dim=dim, theta=float(s["rope_theta"]), scaling=scaling, interleaved=interleaved)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(s: dict) -> float:
    """What multiplies cos and sin: the explicit value; else the ratio of the two mscales; else the one of mscale 1."""
    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])
    factor = float(s["factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return yarn_mscale(factor, s["mscale"]) / yarn_mscale(factor, s["mscale_all_dim"])
    return yarn_mscale(factor)


def stacks(layers: list[LayerSpec]) -> tuple[Stack, ...]:
    """The fewest repeating patterns that spell these layers: at each place the pattern (of at most 8 layers) that
    covers most."""
    found, start = [], 0
    while start < len(layers):
        best = (1, 1)
        for period in range(1, 9):
            pattern, repeats = layers[start : start + period], 1
            while layers[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        period, repeats = best
        found.append(Stack(tuple(layers[start : start + period]), repeats))
        start += period * repeats
    return tuple(found)


def decoder(family: str, stored: dict, hf: dict, layers: list[LayerSpec]) -> DecoderConfig:
    """A decoder of these layers with a plain final norm. `stored` is the configuration as it was written, `hf` the same with the
    defaults of its class."""
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        stacks=stacks(layers),
        norm=Norm(eps=hf["rms_norm_eps"]),
        family=family,
        hf=json.dumps(stored, sort_keys=True),
        tied_head=bool(hf["tie_word_embeddings"]),
        initializer_range=hf["initializer_range"],
    )
