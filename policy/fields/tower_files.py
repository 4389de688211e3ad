"""Says how towers are stored in Hugging Face files: `vision_config` and `audio_config`, and the
names of weights. Free of jax.

The names of a table are those of the files without the prefix of the tower, such as
"model.visual."; "{n}" counts the tensors that are stacked along our axis 0. Keys are the paths of
our weights in the tower.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from policy.fields.config_fields import UnsupportedModel, activation, first
from policy.fields.names import Stored, Table
from policy.media import (
    ChunkedAudio,
    Conformer,
    Encoder,
    GridVision,
    PooledVision,
    Siglip,
    TileVision,
    WindowVision,
)


def grid_vision(config: dict, deepstack: tuple[int, ...] = ()) -> GridVision:
    """Reads the `vision_config` of a Qwen model. `deepstack`: the default of
    `deepstack_visual_indexes`."""
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
            f"vision_config: deepstack_visual_indexes {list(features)} must be ascending numbers "
            f"of the {hf['depth']} blocks"
        )
    encoder = _encoder(hf, "depth", "num_heads", eps=1e-6)
    if encoder.head_dim % 4:
        raise UnsupportedModel(
            f"vision_config: heads of {encoder.head_dim} cannot turn by rows and columns"
        )
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


def window_vision(config: dict) -> WindowVision:
    """Returns the tower of a `vision_config` of Qwen2.5-VL, with the defaults of
    Qwen2_5_VLVisionConfig."""
    hf: dict[str, Any] = {
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    } | config
    # The norms have 1e-6 whatever the configuration says.
    encoder = _encoder(hf, "depth", "num_heads", eps=1e-6)
    if encoder.head_dim % 4:
        raise UnsupportedModel(
            f"vision_config: heads of {encoder.head_dim} cannot turn by rows and columns"
        )
    if first(hf, "head_dim", default=encoder.head_dim) != encoder.head_dim:
        raise UnsupportedModel(
            f"vision_config: head_dim {hf['head_dim']} must be hidden_size / num_heads, "
            f"{encoder.head_dim}"
        )
    turned = first(first(hf, "rope_parameters", default={}), "rope_type", default="axial")
    if turned != "axial":
        raise UnsupportedModel(
            f"vision_config: rope_parameters.rope_type {turned!r} is not supported; known: axial"
        )
    patch = _side(hf, "patch_size")
    merge = hf["spatial_merge_size"]
    window = hf["window_size"] // merge // patch
    if window < 1:
        raise UnsupportedModel(
            f"vision_config: window_size {hf['window_size']} must be at least spatial_merge_size "
            f"times patch_size, {merge * patch}"
        )
    return WindowVision(
        depth=encoder.depth,
        width=encoder.width,
        heads=encoder.heads,
        mlp_width=encoder.mlp_width,
        activation=encoder.activation,
        patch=patch,
        merge=merge,
        window=window,
        full=tuple(n for n in range(encoder.depth) if n in hf["fullatt_block_indexes"]),
        eps=encoder.eps,
        channels=hf["in_channels"],
        frames=_side(hf, "temporal_patch_size"),
        theta=_theta(hf, 1e4),
        initializer_range=encoder.initializer_range,
    )


def siglip(config: dict, rows: int = 256) -> Siglip:
    """Reads the `vision_config` of Gemma 3. `rows`: the wrapper's `mm_tokens_per_image`."""
    hf: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    } | config
    encoder = _encoder(hf, "num_hidden_layers", "num_attention_heads", hf["layer_norm_eps"])
    side = _side(hf, "image_size") // _side(hf, "patch_size")
    cells = math.isqrt(rows)
    if cells**2 != rows or side % cells:
        raise UnsupportedModel(
            f"mm_tokens_per_image {rows}: must be the square of a number that divides the {side} "
            "patches of a side"
        )
    return Siglip(encoder, _side(hf, "patch_size"), side, side // cells, hf["num_channels"])


def tile_vision(config: dict) -> TileVision:
    """Reads the `vision_config` of Llama 4."""
    hf: dict[str, Any] = {
        "hidden_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "num_channels": 3,
        "intermediate_size": 5632,
        "vision_output_dim": 7680,
        "image_size": 448,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        # The class computes exact GELU and 1e-5 whatever `hidden_act` and `norm_eps` say.
        "hidden_act": "gelu",
    } | config
    encoder = _encoder(
        hf | {"hidden_act": "gelu"}, "num_hidden_layers", "num_attention_heads", 1e-5
    )
    merge = round(1 / hf["pixel_shuffle_ratio"])
    side = _side(hf, "image_size") // _side(hf, "patch_size")
    joined = merge**2 * encoder.width
    out = hf["projector_output_dim"]
    if (
        side % merge
        or hf["intermediate_size"] != joined
        or not hf["projector_input_dim"] == out == hf["vision_output_dim"]
    ):
        raise UnsupportedModel(
            f"vision_config: of a side of {side} patches {merge} are joined, so intermediate_size "
            f"must be {joined}, "
            "and projector_input_dim, projector_output_dim and vision_output_dim must be equal"
        )
    if encoder.head_dim % 4:
        raise UnsupportedModel(
            f"vision_config: heads of {encoder.head_dim} cannot turn by rows and columns"
        )
    return TileVision(
        encoder, _side(hf, "patch_size"), side, merge, out, out, hf["num_channels"], _theta(hf, 1e4)
    )


def pooled_vision(config: dict) -> PooledVision:
    """Reads the `vision_config` of Gemma 4."""
    hf: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "position_embedding_size": 10240,
        "use_clipped_linears": False,
        "standardize": False,
    } | config
    if hf["head_dim"] % 4:
        raise UnsupportedModel(
            f"vision_config: heads of {hf['head_dim']} cannot turn by rows and columns"
        )
    return PooledVision(
        depth=hf["num_hidden_layers"],
        width=hf["hidden_size"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        mlp_width=hf["intermediate_size"],
        activation=activation(hf, "hidden_activation"),
        eps=hf["rms_norm_eps"],
        patch=_side(hf, "patch_size"),
        pool=hf["pooling_kernel_size"],
        positions=hf["position_embedding_size"],
        theta=_theta(hf, 100.0),
        clipped=bool(hf["use_clipped_linears"]),
        standardized=bool(hf["standardize"]),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )


def chunked_audio(config: dict) -> ChunkedAudio:
    """Returns the tower of an `audio_config` of Qwen3-Omni, with the defaults of
    Qwen3OmniMoeAudioEncoderConfig. Raises UnsupportedModel for windows that the number of rows does
    not follow."""
    hf: dict[str, Any] = {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "activation_function": "gelu",
        "n_window": 50,
        "n_window_infer": 800,
        "downsample_hidden_size": 480,
    } | config
    if hf["n_window"] != 50 or hf["n_window_infer"] % 100:
        raise UnsupportedModel(
            f"audio_config: n_window {hf['n_window']} must be 50, of which the number of rows is "
            f"a function, and n_window_infer {hf['n_window_infer']} a multiple of 100"
        )
    shared = {
        "hidden_size": "d_model",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_act": "activation_function",
    }
    encoder = _encoder(
        hf | {ours: hf[key] for ours, key in shared.items()},
        "encoder_layers",
        "encoder_attention_heads",
        1e-5,
    )
    return ChunkedAudio(
        encoder, hf["num_mel_bins"], hf["downsample_hidden_size"], hf["n_window_infer"] // 100
    )


def conformer(config: dict) -> Conformer:
    """Reads the `audio_config` of Gemma 4."""
    hf: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "hidden_act": "silu",
        "subsampling_conv_channels": (128, 32),
        "conv_kernel_size": 5,
        "residual_weight": 0.5,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_logit_cap": 50.0,
        "use_clipped_linears": True,
        "rms_norm_eps": 1e-6,
        "output_proj_dims": 1536,
    } | config
    chunk, left, right = (
        hf[f"attention_{key}"] for key in ("chunk_size", "context_left", "context_right")
    )
    # Elsewhere the table of distances that the class shifts belongs to other distances than those
    # of its keys.
    if right or chunk != left - 1:
        raise UnsupportedModel(
            f"audio_config: attention_chunk_size {chunk} must be attention_context_left {left} "
            f"less 1, and attention_context_right {right} must be 0"
        )
    if hf["hidden_size"] % hf["num_attention_heads"]:
        raise UnsupportedModel(
            f"audio_config: hidden_size {hf['hidden_size']} is not a multiple of its "
            f"{hf['num_attention_heads']} heads"
        )
    first_channels, second_channels = hf["subsampling_conv_channels"]
    return Conformer(
        depth=hf["num_hidden_layers"],
        width=hf["hidden_size"],
        heads=hf["num_attention_heads"],
        mels=first_channels,  # the class has as many mel bins as channels of the first convolution
        channels=(first_channels, second_channels),
        kernel=hf["conv_kernel_size"],
        context=left - 1,
        out=hf["output_proj_dims"],
        activation=activation(hf),
        cap=hf["attention_logit_cap"],
        residual=hf["residual_weight"],
        eps=hf["rms_norm_eps"],
        clipped=bool(hf["use_clipped_linears"]),
        initializer_range=first(hf, "initializer_range", default=0.02),
    )


def _encoder(hf: dict, depth: str, heads: str, eps: float) -> Encoder:
    """Reads the blocks of a tower. Raises UnsupportedModel if the width is not a multiple of the
    heads."""
    width = hf["hidden_size"]
    number = hf[heads]
    if width % number:
        raise UnsupportedModel(
            f"hidden_size {width} of a tower is not a multiple of its {number} heads"
        )
    std = first(hf, "initializer_range", default=0.02)
    return Encoder(hf[depth], width, number, hf["intermediate_size"], activation(hf), eps, std)


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


# How the names of towers and their projections begin in the files of multimodal models.
ROOTS = (
    *("visual", "vision_tower", "vision_model", "audio_tower"),
    *("multi_modal_projector", "mm_projector", "embed_vision", "embed_audio", "vision_embedder"),
)


def _linear(ours: str, stored: str, layout: str = "o i -> i o", bias: str = "") -> Table:
    """Returns the entries of a linear layer and its bias."""
    return {
        f"{ours}_proj": Stored(f"{stored}.weight", layout),
        f"{ours}_bias": Stored(f"{stored}.bias", bias),
    }


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
_ATTENTION: Table = (
    {
        f"blocks.{part}": Stored("blocks.{n}.attn.qkv.weight", "(h d)+ e -> e h d", _QKV[0])
        for part in _QKV[0]
    }
    | {
        f"blocks.{part}": Stored("blocks.{n}.attn.qkv.bias", "(h d)+ -> h d", _QKV[1])
        for part in _QKV[1]
    }
    | _linear("blocks.o", "blocks.{n}.attn.proj", "e (h d) -> h d e")
)
GRID_VISION: Table = (
    _linear("patch", "patch_embed.proj", "d c f y x -> c f y x d")
    | {"positions": Stored("pos_embed.weight")}
    | _norm("blocks.input_norm", "blocks.{n}.norm1")
    | _norm("blocks.mlp_norm", "blocks.{n}.norm2")
    | _ATTENTION
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

WINDOW_VISION: Table = (
    {
        "patch_proj": Stored("patch_embed.proj.weight", "d c f y x -> c f y x d"),
        "blocks.input_norm.weight": Stored("blocks.{n}.norm1.weight"),
        "blocks.mlp_norm.weight": Stored("blocks.{n}.norm2.weight"),
        "norm.weight": Stored("merger.ln_q.weight"),
    }
    | _ATTENTION
    | _linear("blocks.gate", "blocks.{n}.mlp.gate_proj")
    | _linear("blocks.up", "blocks.{n}.mlp.up_proj")
    | _linear("blocks.down", "blocks.{n}.mlp.down_proj")
    | _linear("up", "merger.mlp.0")
    | _linear("down", "merger.mlp.2")
)


def _separate(stored: str, out: str) -> Table:
    """Returns the entries of attention whose queries, keys and values are separate layers with
    biases."""
    table = {}
    for name in "qkv":
        table |= _linear(
            f"blocks.{name}", f"{stored}.{name}_proj", "(h d) e -> e h d", "(h d) -> h d"
        )
    return table | _linear("blocks.o", f"{stored}.{out}", "e (h d) -> h d e")


SIGLIP: Table = (
    _linear("patch", "vision_tower.embeddings.patch_embedding", "d c y x -> c y x d")
    | {"positions": Stored("vision_tower.embeddings.position_embedding.weight")}
    | _norm("blocks.input_norm", "vision_tower.encoder.layers.{n}.layer_norm1")
    | _norm("blocks.mlp_norm", "vision_tower.encoder.layers.{n}.layer_norm2")
    | _separate("vision_tower.encoder.layers.{n}.self_attn", "out_proj")
    | _linear("blocks.up", "vision_tower.encoder.layers.{n}.mlp.fc1")
    | _linear("blocks.down", "vision_tower.encoder.layers.{n}.mlp.fc2")
    | _norm("norm", "vision_tower.post_layernorm")
    | {
        "row_norm.weight": Stored("multi_modal_projector.mm_soft_emb_norm.weight"),
        "out_proj": Stored("multi_modal_projector.mm_input_projection_weight"),
    }
)
TILE_VISION: Table = (
    {
        "patch_proj": Stored("vision_model.patch_embedding.linear.weight", "d (c y x) -> c y x d"),
        "class_token": Stored("vision_model.class_embedding"),
        "positions": Stored("vision_model.positional_embedding_vlm"),
    }
    | _norm("first_norm", "vision_model.layernorm_pre")
    | _norm("blocks.input_norm", "vision_model.model.layers.{n}.input_layernorm")
    | _norm("blocks.mlp_norm", "vision_model.model.layers.{n}.post_attention_layernorm")
    | _separate("vision_model.model.layers.{n}.self_attn", "o_proj")
    | _linear("blocks.up", "vision_model.model.layers.{n}.mlp.fc1")
    | _linear("blocks.down", "vision_model.model.layers.{n}.mlp.fc2")
    | _norm("norm", "vision_model.layernorm_post")
    | {
        "up_proj": Stored("vision_model.vision_adapter.mlp.fc1.weight", "o i -> i o"),
        "down_proj": Stored("vision_model.vision_adapter.mlp.fc2.weight", "o i -> i o"),
        "out_proj": Stored("multi_modal_projector.linear_1.weight", "o i -> i o"),
    }
)


def _clipped(ours: str, stored: str, layout: str = "o i -> i o") -> Table:
    """Returns the entries of a linear layer of Gemma 4 and its bounds."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return {f"{ours}_proj": Stored(f"{stored}.linear.weight", layout)} | {
        f"{ours}_{bound}": Stored(f"{stored}.{bound}") for bound in bounds
    }


_GEMMA4_BLOCK = "vision_tower.encoder.layers.{n}."
POOLED_VISION: Table = {
    "patch_proj": Stored("vision_tower.patch_embedder.input_proj.weight", "d (y x c) -> y x c d"),
    "positions": Stored("vision_tower.patch_embedder.position_embedding_table"),
    "shift": Stored("vision_tower.std_bias"),
    "scale": Stored("vision_tower.std_scale"),
    "out_proj": Stored("embed_vision.embedding_projection.weight", "o i -> i o"),
    "blocks.input_norm.weight": Stored(_GEMMA4_BLOCK + "input_layernorm.weight"),
    "blocks.attention_norm.weight": Stored(_GEMMA4_BLOCK + "post_attention_layernorm.weight"),
    "blocks.mlp_norm.weight": Stored(_GEMMA4_BLOCK + "pre_feedforward_layernorm.weight"),
    "blocks.output_norm.weight": Stored(_GEMMA4_BLOCK + "post_feedforward_layernorm.weight"),
    "blocks.q_norm.weight": Stored(_GEMMA4_BLOCK + "self_attn.q_norm.weight"),
    "blocks.k_norm.weight": Stored(_GEMMA4_BLOCK + "self_attn.k_norm.weight"),
} | _clipped("blocks.o", _GEMMA4_BLOCK + "self_attn.o_proj", "e (h d) -> h d e")
for _name in "qkv":
    POOLED_VISION |= _clipped(
        f"blocks.{_name}", f"{_GEMMA4_BLOCK}self_attn.{_name}_proj", "(h d) e -> e h d"
    )
for _name in ("gate", "up", "down"):
    POOLED_VISION |= _clipped(f"blocks.{_name}", f"{_GEMMA4_BLOCK}mlp.{_name}_proj")


CHUNKED_AUDIO: Table = {
    "frame_proj": Stored("conv_out.weight", "d (c f) -> f c d"),
}
for _name, _stored in (("first", "conv2d1"), ("second", "conv2d2"), ("third", "conv2d3")):
    CHUNKED_AUDIO |= {
        f"{_name}_conv": Stored(f"{_stored}.weight", "o i f t -> t f i o"),
        f"{_name}_bias": Stored(f"{_stored}.bias"),
    }
CHUNKED_AUDIO |= (
    _norm("blocks.input_norm", "layers.{n}.self_attn_layer_norm")
    | _norm("blocks.mlp_norm", "layers.{n}.final_layer_norm")
    | _separate("layers.{n}.self_attn", "out_proj")
    | _linear("blocks.up", "layers.{n}.fc1")
    | _linear("blocks.down", "layers.{n}.fc2")
    | _norm("norm", "ln_post")
    | _linear("up", "proj1")
    | _linear("down", "proj2")
)

CONFORMER: Table = {
    "frame_proj": Stored(
        "audio_tower.subsample_conv_projection.input_proj_linear.weight", "d (f c) -> f c d"
    ),
    "out_proj": Stored("embed_audio.embedding_projection.weight", "o i -> i o"),
} | _linear("inner", "audio_tower.output_proj")
for _name, _stored in (("first", "layer0"), ("second", "layer1")):
    _stored = f"audio_tower.subsample_conv_projection.{_stored}"
    CONFORMER |= {
        f"{_name}_conv": Stored(f"{_stored}.conv.weight", "o i t f -> t f i o"),
        f"{_name}_norm.weight": Stored(f"{_stored}.norm.weight"),
    }
for _name, _stored in (("first", "feed_forward1"), ("second", "feed_forward2")):
    _ours = f"blocks.{_name}"
    _stored = f"audio_tower.layers.{{n}}.{_stored}"
    CONFORMER |= (
        _clipped(f"{_ours}.up", f"{_stored}.ffw_layer_1")
        | _clipped(f"{_ours}.down", f"{_stored}.ffw_layer_2")
        | {f"{_ours}.input_norm.weight": Stored(f"{_stored}.pre_layer_norm.weight")}
        | {f"{_ours}.output_norm.weight": Stored(f"{_stored}.post_layer_norm.weight")}
    )
_CONFORMER_BLOCK = "audio_tower.layers.{n}."
for _name in "qkv":
    CONFORMER |= _clipped(
        f"blocks.attention.{_name}", f"{_CONFORMER_BLOCK}self_attn.{_name}_proj", "(h d) e -> e h d"
    )
CONFORMER |= (
    _clipped("blocks.attention.o", _CONFORMER_BLOCK + "self_attn.post")
    | _clipped("blocks.convolution.up", _CONFORMER_BLOCK + "lconv1d.linear_start")
    | _clipped("blocks.convolution.down", _CONFORMER_BLOCK + "lconv1d.linear_end")
    | {
        "blocks.attention.distance_proj": Stored(
            _CONFORMER_BLOCK + "self_attn.relative_k_proj.weight", "(h d) e -> e h d"
        ),
        "blocks.attention.scale": Stored(_CONFORMER_BLOCK + "self_attn.per_dim_scale"),
        "blocks.convolution.conv": Stored(
            _CONFORMER_BLOCK + "lconv1d.depthwise_conv1d.weight", "d 1 w -> w d"
        ),
        "blocks.convolution.input_norm.weight": Stored(
            _CONFORMER_BLOCK + "lconv1d.pre_layer_norm.weight"
        ),
        "blocks.convolution.norm.weight": Stored(_CONFORMER_BLOCK + "lconv1d.conv_norm.weight"),
        "blocks.input_norm.weight": Stored(_CONFORMER_BLOCK + "norm_pre_attn.weight"),
        "blocks.attention_norm.weight": Stored(_CONFORMER_BLOCK + "norm_post_attn.weight"),
        "blocks.output_norm.weight": Stored(_CONFORMER_BLOCK + "norm_out.weight"),
    }
)
