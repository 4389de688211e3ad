"""Reads the processors of a model's directory: processor_config.json, preprocessor_config.json and config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.suggest import nearest
from rollout.media import gemma3, gemma4, gemma4_audio, llama4, qwen, qwen_audio
from rollout.media.item import NOUNS, Kind, MediaError, Processor

_Reader = Callable[[Mapping[str, Any], Mapping[str, Any], Any], Processor]

_READERS: dict[str, _Reader] = {
    "Qwen2VLImageProcessor": qwen.read,
    "Gemma3ImageProcessor": gemma3.read,
    "Gemma4ImageProcessor": gemma4.read,
    "Llama4ImageProcessor": llama4.read,
    "WhisperFeatureExtractor": qwen_audio.read,
    "Gemma4AudioFeatureExtractor": gemma4_audio.read,
}
"""Classes of transformers, without the suffix of their form, to the readers of their configurations."""
_SUFFIXES = ("Fast", "Pil")


@dataclass(frozen=True)
class Processors:
    """The processors of a model; None for what it does not read.

    problem: why a model with towers has no processors, for the message about the first row that needs one.
    """

    image: Processor | None
    audio: Processor | None
    problem: str = ""

    def of(self, kind: Kind) -> Processor:
        """Returns the processor of a kind. Raises MediaError if the model reads nothing of the kind."""
        processor = self.image if kind == "image" else self.audio
        if processor is None:
            text = f"the row has a {NOUNS[kind]}, but the model has no processor of {NOUNS[kind]}s"
            raise MediaError(f"{text}: {self.problem}" if self.problem else text)
        return processor

    @property
    def all(self) -> tuple[Processor, ...]:
        """Returns the processors that exist."""
        return tuple(p for p in (self.image, self.audio) if p is not None)


def read(directory: Path, tokenizer: Any) -> Processors:
    """Reads the processors of a model's directory. The markers are those of its tokenizer.

    Raises MediaError for a directory without a processor, and for a class that is not supported.
    """
    flat = _stored(directory / "preprocessor_config.json")
    nested = _stored(directory / "processor_config.json")
    # Keys that a processor needs of the model: patches of Gemma 3, attention of Gemma 4.
    model = {key: value for key, value in _stored(directory / "config.json").items() if key.endswith("_config")}
    rest = {
        **model,
        **{key: value for key, value in nested.items() if key not in ("image_processor", "feature_extractor")},
    }
    image = nested.get("image_processor") or (flat if "image_processor_type" in flat else None)
    audio = nested.get("feature_extractor") or (flat if "feature_extractor_type" in flat else None)
    if image is None and audio is None:
        raise MediaError(f"{directory}: no preprocessor_config.json or processor_config.json that names a processor")
    try:
        return Processors(
            None if image is None else _reader(image, "image_processor_type")(image, rest, tokenizer),
            None if audio is None else _reader(audio, "feature_extractor_type")(audio, rest, tokenizer),
        )
    except MediaError as error:
        raise MediaError(f"{directory}: {error}") from None


def _reader(stored: Mapping[str, Any], key: str) -> _Reader:
    name = str(stored.get(key, "None"))
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if name not in _READERS:
        raise MediaError(f"unknown {key} {name!r}{nearest(name, _READERS)}")
    return _READERS[name]


def _stored(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MediaError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(stored, dict):
        raise MediaError(f"{file}: must hold an object {{...}}")
    return stored
