"""Reads the processors of a model's directory: processor_config.json, preprocessor_config.json and
config.json."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.json_types import DecodedKeys
from rewards.suggest import nearest
from rollout.media import families
from rollout.media.processor import NOUNS, Kind, MediaError, Processor
from rollout.text.interface import Tokenizer

_Reader = Callable[[DecodedKeys, DecodedKeys, Tokenizer], Processor]

_FILES = [
    importlib.import_module(f"{families.__name__}.{each.name}")
    for each in pkgutil.iter_modules(families.__path__)
]
_READERS: dict[str, _Reader] = {file.CLASS: file.read for file in _FILES}
"""Classes of transformers, without the suffixes Fast and Pil, to the readers of their
configurations."""
_SUFFIXES = ("Fast", "Pil")


@dataclass(frozen=True)
class Processors:
    """The processors of a model; None for what it does not read.

    problem: why a model with towers has no processors, for the message about the first row that
    needs one.
    """

    image: Processor | None
    audio: Processor | None
    problem: str = ""

    def of(self, kind: Kind) -> Processor:
        """Returns the processor of a kind. Raises MediaError if the model reads nothing of the
        kind."""
        processor = self.image if kind == "image" else self.audio
        if processor is None:
            text = f"the row has a {NOUNS[kind]}, but the model has no processor of {NOUNS[kind]}s"
            raise MediaError(f"{text}: {self.problem}" if self.problem else text)
        return processor

    @property
    def all(self) -> tuple[Processor, ...]:
        """The processors that the model has, that of pictures first."""
        return tuple(p for p in (self.image, self.audio) if p is not None)


@dataclass(frozen=True)
class ProcessorConfigs:
    """The configurations of the processors of a model, before the tokenizer is known.

    image, audio: keys of its image processor and of its feature extractor; None: the model has
    none.
    rest: what else a processor needs to know: other keys of processor_config.json, and the sections
    of config.json.
    """

    image: Mapping[str, Any] | None
    audio: Mapping[str, Any] | None
    rest: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the classes of transformers, without the suffixes Fast and Pil."""
        both = ((self.image, "image_processor_type"), (self.audio, "feature_extractor_type"))
        return tuple(_class(stored, key) for stored, key in both if stored is not None)

    def processors(self, tokenizer: Tokenizer, where: str) -> Processors:
        """Returns the processors; the markers are those of the tokenizer.

        where: the model, for messages.
        Raises MediaError for a class that is not supported.
        """
        image = self.image
        audio = self.audio
        try:
            return Processors(
                None
                if image is None
                else _reader(image, "image_processor_type")(image, self.rest, tokenizer),
                None
                if audio is None
                else _reader(audio, "feature_extractor_type")(audio, self.rest, tokenizer),
            )
        except MediaError as error:
            raise MediaError(f"{where}: {error}") from None


def stored(model: DecodedKeys, nested: DecodedKeys, flat: DecodedKeys) -> ProcessorConfigs:
    """Returns the processors by the contents of config.json, processor_config.json and
    preprocessor_config.json."""
    # Keys that a processor needs of the model: patches of Gemma 3, attention of Gemma 4.
    rest = {key: value for key, value in model.items() if key.endswith("_config")}
    rest |= {
        key: value
        for key, value in nested.items()
        if key not in ("image_processor", "feature_extractor")
    }
    image = nested.get("image_processor") or (flat if "image_processor_type" in flat else None)
    audio = nested.get("feature_extractor") or (flat if "feature_extractor_type" in flat else None)
    return ProcessorConfigs(image, audio, rest)


def of_directory(directory: Path) -> ProcessorConfigs:
    """Returns the processors by the files of a model's directory. Raises MediaError for a file that
    is not JSON."""
    names = ("config.json", "processor_config.json", "preprocessor_config.json")
    return stored(*(_stored(directory / name) for name in names))


def read(directory: Path, tokenizer: Tokenizer) -> Processors:
    """Reads the processors of a model's directory. The markers are those of its tokenizer.

    Raises MediaError for a directory without a processor, for a class that is not supported, and
    for a tokenizer that does not say where its tokens begin.
    """
    if not getattr(tokenizer, "is_fast", True):
        raise MediaError(
            f"a tokenizer of the class {type(tokenizer).__name__} does not say where its tokens "
            "begin, so pictures and "
            "sounds cannot be put in their places; use one with a tokenizer.json"
        )
    files = of_directory(directory)
    if files.image is None and files.audio is None:
        raise MediaError(
            f"{directory}: no preprocessor_config.json or processor_config.json that names a "
            "processor"
        )
    return files.processors(tokenizer, str(directory))


def _reader(stored: DecodedKeys, key: str) -> _Reader:
    name = _class(stored, key)
    if name not in _READERS:
        raise MediaError(f"unknown {key} {name!r}{nearest(name, _READERS)}")
    return _READERS[name]


def _class(stored: DecodedKeys, key: str) -> str:
    name = str(stored.get(key, "None"))
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _stored(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise MediaError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise MediaError(f"{file}: cannot be read: {error}") from None
    if not isinstance(stored, dict):
        raise MediaError(f"{file}: must hold an object {{...}}")
    return stored
