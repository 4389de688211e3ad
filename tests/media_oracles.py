"""Tiny multimodal models of transformers, as oracles of the text side: what they say about a
document with two pictures, and the rows that their towers made of them. Every weight is perturbed,
since norms and position tables start constant."""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
from towers import CHUNKED, WINDOWS
from towers import GRID as VISION

import policy
from policy import families
from policy.cache.media import Media, MediaTable
from policy.media import Item

IMAGE, SOUND = 150, 154
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
} | SPECIAL
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}
GRID = VISION | {"initializer_range": 0.2}
SECTIONS = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0}
_MOE = TEXT | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rope_parameters": SECTIONS,
    "num_experts": 4,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
# Class of transformers -> (text configuration, vision configuration, further keys of the wrapper).
MODELS = {
    "Qwen3VL": (
        TEXT | {"num_hidden_layers": 4, "head_dim": 16, "rope_parameters": SECTIONS},
        GRID,
        IDS | {"tie_word_embeddings": False},
    ),
    "Qwen3VLMoe": (
        _MOE | {"tie_word_embeddings": True},  # which no class reads: the wrapper's key decides
        GRID,
        IDS | {"tie_word_embeddings": False},
    ),
    "Qwen3OmniMoeThinker": (
        _MOE,
        GRID,
        IDS
        | {
            "audio_token_id": SOUND,
            "audio_start_token_id": 155,
            "audio_config": CHUNKED | {"initializer_range": 0.2},
            "initializer_range": 0.2,
        },
    ),
    "Qwen3_5": (
        TEXT
        | {
            "num_hidden_layers": 4,
            "initializer_range": 0.1,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": SECTIONS
            | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        {key: value for key, value in GRID.items() if key != "deepstack_visual_indexes"}
        | {"depth": 2},
        IDS,
    ),
    "Qwen2_5_VL": (
        TEXT
        | {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 2, 1],
            },
        },
        WINDOWS | {"window_size": 16, "initializer_range": 0.2},
        IDS,
    ),
    "Gemma3": (
        TEXT
        | {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "rope_parameters": _TWO_ROPES,
        },
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
        {
            "image_token_index": IMAGE,
            "boi_token_index": 152,
            "eoi_token_index": 153,
            "mm_tokens_per_image": 9,
        },
    ),
    "Gemma4": (
        TEXT
        | {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 4,
            "final_logit_softcapping": 3.0,
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": _TWO_ROPES | {"full_attention": _PROPORTIONAL},
        },
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
            "standardize": True,
        },
        {
            "image_token_id": IMAGE,
            "boi_token_id": 152,
            "eoi_token_id": 153,
            "audio_token_id": 154,
            "audio_config": None,
        },
    ),
    "Llama4": (
        TEXT
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "intermediate_size": 16,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "floor_scale": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 24,
            "patch_size": 4,
            "vision_output_dim": 20,
            "projector_input_dim": 20,
            "projector_output_dim": 20,
        },
        {"image_token_index": IMAGE, "boi_token_index": 152, "eoi_token_index": 153},
    ),
}
# The part of each model whose output is the rows, and the pictures of a document as (height, width)
# in rows. (rows,) is a sound.
_TOWER = {
    "Gemma3": "multi_modal_projector",
    "Gemma4": "embed_vision",
    "Llama4": "multi_modal_projector",
}
PICTURES = {"Gemma3": [(3, 3), (3, 3)], "Gemma4": [(2, 3), (2, 3)], "Llama4": [(3, 3), (3, 3)]}
PICTURES["Qwen2_5_VL"] = [(2, 5), (3, 2)]  # of several windows
PICTURES["Qwen3OmniMoeThinker"] = [(2, 3), (13,)]
FRAMES = 100  # of a sound: one chunk, of 13 rows
LOOKS_AHEAD = ("Gemma3", "Gemma4")
_COMPUTED = ("inv_freq", "embed_scale", "positional_embedding.")  # buffers that no file holds


def build(kind: str, seed: int = 0):
    """The model of transformers, float32, eager attention, all of its weights perturbed."""
    import torch
    import transformers

    text, vision, keys = copy.deepcopy(MODELS[kind])
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **keys)
    for each in (
        config,
        config.text_config,
        config.vision_config,
        getattr(config, "audio_config", None) or config,
    ):
        each._attn_implementation = each._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    if kind == "Llama4":  # 5.23 reads a field that the output of its text model lacks
        model.language_model.register_forward_hook(
            lambda module, inputs, out: setattr(out, "image_outputs", None)
        )
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "std_" in name:  # created empty
                tensor.copy_(1.0 + torch.randn_like(tensor) * 0.3)
            elif tensor.is_floating_point() and not any(part in name for part in _COMPUTED):
                tensor.add_(torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else 0.05))
    return model


@functools.cache
def random_policy(kind: str):
    """The model of `build`'s configuration with its towers and random weights of ours."""
    import transformers

    text, vision, keys = copy.deepcopy(MODELS[kind])
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **keys)
    hf = config.to_dict() | {"architectures": [f"{kind}ForConditionalGeneration"]}
    return policy.create(families.read(hf, media=True), seed=3)


def drawn(spec, shapes, seed: int = 0) -> dict[Item, np.ndarray]:
    """Random pictures of these sizes in patches, with what the tower reads of each."""
    rng = np.random.default_rng(seed)
    return {
        Item("image", f"{seed}.{n}", (h, w), spec.rows_of((h, w))): rng.normal(
            size=(h * w, spec.input_width)
        ).astype(np.float32)
        for n, (h, w) in enumerate(shapes)
    }


@dataclass(frozen=True, eq=False)
class Document:
    """A document with pictures: its tokens, its media, and what the oracle is given and says about
    it, float32[T, V]."""

    tokens: np.ndarray
    media: Media
    inputs: dict
    logits: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def places(
    kind: str, texts: tuple[int, ...], seed: int
) -> tuple[np.ndarray, list[tuple[int, ...]], Media]:
    """(tokens, pictures, media with an empty table) of texts of these lengths with a picture or a
    sound between each two."""
    rng, shapes = (
        np.random.default_rng(seed),
        PICTURES.get(kind, [(2, 3), (2, 2)])[: len(texts) - 1],
    )
    tokens, index, turns, until, count, row = [], [], [], [], 0, 0
    for number, length in enumerate(texts):
        tokens += rng.integers(0, 149, length).tolist()
        index += [-1] * length
        until += range(len(until), len(until) + length)
        turns += [(count + n,) * 3 for n in range(length)]
        count += length
        if number == len(texts) - 1:
            break
        if len(shapes[number]) == 1:  # a sound, whose positions are those of text
            (length,) = shapes[number]
            tokens += [SOUND] * length
            index += range(row, row + length)
            until += [len(until) + length - 1] * length
            turns += [(count + n,) * 3 for n in range(length)]
            row, count = row + length, count + length
            continue
        h, w = shapes[number]
        tokens += [IMAGE] * (h * w)
        index += range(row, row + h * w)
        until += [len(until) + h * w - 1] * (h * w)
        turns += [(count, count + y, count + x) for y in range(h) for x in range(w)]
        row, count = row + h * w, count + max(h, w)
    if kind == "Qwen3OmniMoeThinker":  # it finds pictures and sounds by the tokens around them
        for at in [n for n in range(1, len(tokens)) if (index[n] < 0) != (index[n - 1] < 0)]:
            placeholder = tokens[at] if index[at] >= 0 else tokens[at - 1]
            start, end = (152, 153) if placeholder == IMAGE else (155, 156)
            tokens[at - 1 if index[at] >= 0 else at] = start if index[at] >= 0 else end
    arrays = [np.asarray(each, np.int32) for each in (index, turns, until)]
    qwen = kind.startswith("Qwen")
    media = Media(
        arrays[0],
        np.zeros((0, 32), np.float32),
        turns=arrays[1] if qwen else None,
        until=arrays[2] if kind in LOOKS_AHEAD else None,
    )
    assert media.delta == (count - len(tokens) if qwen else 0)
    return np.asarray(tokens), shapes, media


def document(
    kind: str, model, texts: tuple[int, ...] = (4, 3, 5), seed: int = 1, pictures: int | None = None
) -> Document:
    """A document of texts of these lengths with pictures of noise between them, or a sound, with
    the rows of the oracle's towers. `pictures`: the seed of the pictures, by default that of the
    texts."""
    import torch

    tokens, shapes, media = places(kind, texts, seed)
    inputs = _pictures(
        kind, shapes, torch.Generator().manual_seed(seed if pictures is None else pictures)
    )
    is_picture = torch.tensor(media.index[None] >= 0).long()
    if kind == "Gemma3":
        inputs["token_type_ids"] = is_picture
    elif kind not in ("Llama4", "Qwen3OmniMoeThinker"):
        inputs["mm_token_type_ids"] = is_picture.int()
    tower = model if kind == "Llama4" else model.model
    tower.rope_deltas = None  # it stays from call to call
    tables = []

    def keep(module, inputs, output):  # the model splits the tower's output by picture later
        rows = getattr(output, "pooler_output", output)
        rows = output.last_hidden_state if rows is None else rows
        deep = getattr(output, "deepstack_features", None)
        deep = np.stack([each.numpy() for each in deep]) if deep else None
        tables.append(MediaTable(rows.reshape(-1, rows.shape[-1]).numpy(), deep))

    towers = [_TOWER.get(kind, "visual"), *(["audio_tower"] if "input_features" in inputs else [])]
    handles = [getattr(tower, name).register_forward_hook(keep) for name in towers]
    ids = torch.tensor(tokens[None])
    mask = {"attention_mask": torch.ones_like(ids)} if kind == "Qwen3OmniMoeThinker" else {}
    with torch.no_grad():
        logits = model(ids, use_cache=False, **mask, **inputs).logits[0].numpy()
    for handle in handles:
        handle.remove()
    table = _one_table(tables)
    media = media.in_table(table)
    assert len(table.rows) == (media.index >= 0).sum()
    return Document(tokens, media, inputs, logits)


def _one_table(tables: list[MediaTable]) -> MediaTable:
    """The rows of a picture, and after them those of a sound, at which deepstack features are 0."""
    if len(tables) == 1:
        return tables[0]
    picture, sound = sorted(tables, key=lambda table: table.deep is None)
    assert picture.deep is not None
    deep = np.pad(picture.deep, ((0, 0), (0, len(sound.rows)), (0, 0)))
    return MediaTable(np.concatenate([picture.rows, sound.rows]), deep)


def plain(kind: str, length: int, seed: int = 3) -> Document:
    """A document of text in the form of those with pictures."""
    tokens, _, media = places(kind, (length,), seed)
    deep = (
        np.zeros((2, 0, 32), np.float32) if "deepstack_visual_indexes" in MODELS[kind][1] else None
    )
    return Document(
        tokens,
        dataclasses.replace(media, deep=deep),
        {},
        np.zeros((0, 0)),
    )


def _pictures(kind: str, shapes, generator) -> dict:
    """What the oracle gets for pictures of noise of these sizes in rows."""
    import torch

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "Gemma4":
        h, w = (2 * n for n in shapes[0])
        at = torch.tensor([[(x, y) for y in range(h) for x in range(w)]]).repeat(len(shapes), 1, 1)
        return {
            "pixel_values": torch.rand(len(shapes), h * w, 48, generator=generator),
            "image_position_ids": at,
        }
    if kind in ("Gemma3", "Llama4"):
        return {"pixel_values": noise(len(shapes), 3, 24, 24)}
    grid = torch.tensor([(1, 2 * shape[0], 2 * shape[1]) for shape in shapes if len(shape) == 2])
    inputs = {"pixel_values": noise(int(grid.prod(-1).sum()), 96), "image_grid_thw": grid}
    if sounds := sum(len(shape) == 1 for shape in shapes):
        inputs["input_features"] = noise(sounds, CHUNKED["num_mel_bins"], FRAMES)
        inputs["feature_attention_mask"] = torch.ones(sounds, FRAMES, dtype=torch.long)
    return inputs


def batch(rows: list[list[Document]], width: int) -> tuple[np.ndarray, np.ndarray, dict]:
    """(tokens [B, width], segments, media, turns and until as keywords) of rows of documents,
    packed one after the other; the tables are joined into one."""
    documents = [document for row in rows for document in row]
    joined = np.concatenate([each.media.table for each in documents])
    deep = documents[0].media.deep
    deep = None if deep is None else np.concatenate([each.media.deep for each in documents], axis=1)
    shape, first = (len(rows), width), documents[0].media
    tokens, segments, index = (
        np.zeros(shape, int),
        np.zeros(shape, int),
        np.full(shape, -1, np.int32),
    )
    turns, until, offset = np.zeros((*shape, 3), np.int32), np.zeros(shape, np.int32), 0
    for b, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row, 1):
            span, media = (b, slice(at, at + len(document))), document.media
            tokens[span], segments[span] = document.tokens, number
            index[span] = np.where(media.index >= 0, media.index + offset, -1)
            if media.turns is not None:
                turns[span] = media.turns
            if media.until is not None:
                until[span] = media.until
            offset, at = offset + len(media.table), at + len(document)
    keywords = {
        "media": Media(index, joined, deep),
        "turns": None if first.turns is None else turns,
        "until": None if first.until is None else until,
    }
    return tokens, segments, keywords
