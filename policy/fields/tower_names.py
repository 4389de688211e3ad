"""Says how the weights of towers are stored in Hugging Face files. Free of jax.

The names of a table are those of the files without the prefix of the tower, such as
"model.visual."; "{n}" counts the tensors that are stacked along our axis 0. Keys are the paths of
our weights in the tower.
"""

from __future__ import annotations

from dataclasses import replace

from policy.fields.names import Stored, Table

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
