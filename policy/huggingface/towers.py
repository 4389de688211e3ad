"""Reads the tower configurations of Hugging Face files, and says how the weights of towers are stored. Free of jax.

The names of a table are those of the files without the prefix of the tower, such as "model.visual."; "{n}" counts the
tensors that are stacked along our axis 0. Keys are the paths of our weights in the tower.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from policy.huggingface.config_fields import UnsupportedModel, activation, first
from policy.huggingface.names import Stored, Table
from policy.media import Encoder, GridVision


def _linear(ours: str, stored: str, layout: str = "o i -> i o", bias: str = "") -> Table:
    """Returns the entries of a linear layer and its bias."""
    return {f"{ours}_proj": Stored(f"{stored}.weight", layout), f"{ours}_bias": Stored(f"{stored}.bias", bias)}


def _norm(ours: str, stored: str) -> Table:
    return {f"{ours}.{part}": Stored(f"{stored}.{part}") for part in ("weight", "bias")}


def renamed(table: Table, changes: dict[str, str]) -> Table:
    """Returns the table with parts of its stored names replaced, in the order of `changes`."""

    def rename(name: str) -> str:
        for old, new in changes.items():
            name = name.replace(old, new)
        return name

    return {ours: replace(place, name=rename(place.name)) for ours, place in table.items()}


def _by_kind(ours: str, stored: str) -> Table:
    """Returns the entries of a merger."""
    return (
        _norm(f"{ours}.norm", f"{stored}.norm")
        | _linear(f"{ours}.up", f"{stored}.linear_fc1")
        | _linear(f"{ours}.down", f"{stored}.linear_fc2")
    )


_QKV = ("q_proj", "k_proj", "v_proj"), ("q_bias", "k_bias", "v_bias")
GRID_VISION: Table = (
    _linear("patch", "patch_embed.proj", "d c f y x -> c f y x d")
    | {"positions": Stored("pos_embed.weight")}
    | _norm("blocks.input_norm", "blocks.{n}.norm1")
    | _norm("blocks.mlp_norm", "blocks.{n}.norm2")
    | {f"blocks.{part}": Stored("blocks.{n}.attn.qkv.weight", "(h d)+ e -> e h d", _QKV[0]) for part in _QKV[0]}
    | {f"blocks.{part}": Stored("blocks.{n}.attn.qkv.bias", "(h d)+ -> h d", _QKV[1]) for part in _QKV[1]}
    | _linear("blocks.o", "blocks.{n}.attn.proj", "e (h d) -> h d e")
    | _linear("blocks.up", "blocks.{n}.mlp.linear_fc1")
    | _linear("blocks.down", "blocks.{n}.mlp.linear_fc2")
    | _by_kind("merger", "merger")
    | _by_kind("deepstack", "deepstack_merger_list.{n}")
)
GRID_VISION_OF_OMNI = renamed(
    GRID_VISION,
    {
        "deepstack_merger_list": "merger_list",
        "norm.": "ln_q.",
        "merger.linear_fc1": "merger.mlp.0",
        "merger.linear_fc2": "merger.mlp.2",
        "{n}.linear_fc1": "{n}.mlp.0",
        "{n}.linear_fc2": "{n}.mlp.2",
    },
)


def grid_vision(config: dict, deepstack: tuple[int, ...] = ()) -> GridVision:
    """Reads the `vision_config` of a Qwen model. `deepstack`: the default of `deepstack_visual_indexes`."""
    hf: dict[str, Any] = {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deepstack,
    } | config
    features = tuple(hf["deepstack_visual_indexes"] or ())
    if list(features) != sorted(set(features)) or any(not 0 <= n < hf["depth"] for n in features):
        raise UnsupportedModel(
            f"vision_config: deepstack_visual_indexes {list(features)} must be ascending numbers of the "
            f"{hf['depth']} blocks"
        )
    encoder = _encoder(hf, "depth", "num_heads", eps=1e-6)
    if encoder.head_dim % 4:
        raise UnsupportedModel(f"vision_config: heads of {encoder.head_dim} cannot turn by rows and columns")
    return GridVision(
        encoder,
        patch=_side(hf, "patch_size"),
        merge=hf["spatial_merge_size"],
        side=math.isqrt(hf["num_position_embeddings"]),
        deepstack=features,
        channels=hf["in_channels"],
        frames=_side(hf, "temporal_patch_size"),
        theta=_theta(hf, 1e4),
    )


def _encoder(hf: dict, depth: str, heads: str, eps: float) -> Encoder:
    """Reads the blocks of a tower. Raises UnsupportedModel if the width is not a multiple of the heads."""
    width, number = hf["hidden_size"], hf[heads]
    if width % number:
        raise UnsupportedModel(f"hidden_size {width} of a tower is not a multiple of its {number} heads")
    return Encoder(hf[depth], width, number, hf["intermediate_size"], activation(hf), eps)


def _side(hf: dict, key: str) -> int:
    """Returns the side of a square, which may be stored as one number or as two equal ones."""
    value = hf[key]
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) > 1:
        raise UnsupportedModel(f"{key} {value!r}: the sides must be equal")
    return int(sides.pop())


def _theta(hf: dict, default: float) -> float:
    """Returns the base of a tower's rotary positions."""
    return float(first(first(hf, "rope_parameters", default={}), "rope_theta", default=default))
