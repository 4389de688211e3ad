"""Special tokens that pictures and sounds of each family need, for tokenizers that are built in
code.

A directory of a model has its own tokenizer, which knows them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import MediaTokens

_QWEN = MediaTokens(
    {
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",  # the processors of transformers ask for it
        "vision_bos_token": "<|vision_start|>",  # its name in Qwen3-Omni
        "vision_eos_token": "<|vision_end|>",
    },
    {"image": "<|vision_start|><|image_pad|><|vision_end|>"},
)
_QWEN_AUDIO = MediaTokens(
    {
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "audio_token": "<|audio_pad|>",
    },
    {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
)
_GEMMA3 = MediaTokens(
    {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    {"image": "<start_of_image>"},
)
_GEMMA4 = MediaTokens(
    {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    {"image": "<|image|>"},
)
_GEMMA4_AUDIO = MediaTokens(
    {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
    {"audio": "<|audio|>"},
)
_LLAMA4 = MediaTokens(
    {
        "boi_token": "<|image_start|>",
        "eoi_token": "<|image_end|>",
        "image_token": "<|patch|>",  # that of a row, as in config.json
        "fake_image_token": "<|image|>",
        "tile_x_separator_token": "<|tile_x_separator|>",
        "tile_y_separator_token": "<|tile_y_separator|>",
    },
    {"image": "<|image|>"},
)

OF_CLASS: Mapping[str, MediaTokens] = {
    "Qwen2VLImageProcessor": _QWEN,
    "Gemma3ImageProcessor": _GEMMA3,
    "Gemma4ImageProcessor": _GEMMA4,
    "Llama4ImageProcessor": _LLAMA4,
    "WhisperFeatureExtractor": _QWEN_AUDIO,
    "Gemma4AudioFeatureExtractor": _GEMMA4_AUDIO,
}
"""Classes of processors to the tokens that they need."""

_KEYS: Mapping[str, str] = {
    "image_token_id": "image_token",
    "image_token_index": "image_token",
    "video_token_id": "video_token",
    "vision_start_token_id": "vision_start_token",
    "vision_end_token_id": "vision_end_token",
    "audio_token_id": "audio_token",
    "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
    "boi_token_id": "boi_token",
    "boi_token_index": "boi_token",
    "eoi_token_id": "eoi_token",
    "eoi_token_index": "eoi_token",
    "boa_token_id": "boa_token",
    "eoa_token_id": "eoa_token",
    "eoa_token_index": "eoa_token",
}
"""Keys of config.json to the attributes of a tokenizer."""


def joined(classes: Iterable[str]) -> MediaTokens | None:
    """Returns the tokens of all these classes; None if no class needs any."""
    parts = [OF_CLASS[name] for name in classes if name in OF_CLASS]
    if not parts:
        return None
    names = {name: token for part in parts for name, token in part.names.items()}
    return MediaTokens(names, {kind: text for part in parts for kind, text in part.written.items()})


def ids(config: Mapping[str, object], tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the keys of `config` (config.json) that hold ids of such tokens, with the ids of the
    tokenizer.

    A key whose token the tokenizer does not name is left out.
    """
    known = {key: getattr(tokenizer, name, None) for key, name in _KEYS.items() if key in config}
    return {
        key: number
        for key, token in known.items()
        if token is not None and (number := tokenizer.convert_tokens_to_ids(str(token))) is not None
    }
