"""Provides what a run needs of a model that reads pictures or sounds, besides its weights: special
tokens for a tokenizer that is built in code, processors, ids in config.json, and the files of
processors in a saved directory. Imports no jax.

A directory of a model holds files of its processors; a file of configs/models/ describes them under
`processor_config`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from policy.fields import tower_files
from policy.huggingface import sources
from policy.media import is_tower
from rl.config.model import ModelOptions
from rl.data import models
from rl.errors import ModelError
from rollout.media import processors
from rollout.media.processor import MediaError
from rollout.media.processors import ProcessorConfigs, Processors
from rollout.text import media_tokens as tokens
from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import MediaTokens


def stored_processors(model: ModelOptions) -> ProcessorConfigs | None:
    """Returns the processors as the model's files describe them; None for a model that reads texts
    only.

    Raises ModelError for a name on the hub that cannot be read, and for a file that is not JSON.
    """
    if (directory := models.directory(model.source)) is not None:
        try:
            result = processors.of_directory(directory)
        except MediaError as error:
            raise ModelError(f"model: {error}") from None
        return None if result.image is None and result.audio is None else result
    preset = _preset(model)
    return None if preset is None else processors.stored(*preset, {})


def names_tower(entry: str) -> bool:
    """Whether an entry of `freeze` means weights of a tower, by their paths or stored names."""
    roots = "|".join(tower_files.ROOTS)
    return is_tower(entry) or re.search(rf"\b({roots})\b", entry) is not None


def media_tokens(model: ModelOptions) -> MediaTokens | None:
    """Returns the special tokens that a built-in tokenizer needs for the model; None for one that
    reads texts only.

    Raises as `stored_processors`.
    """
    stored = stored_processors(model)
    return None if stored is None else tokens.joined(stored.classes)


def read_processors(model: ModelOptions, tokenizer: Tokenizer) -> Processors | None:
    """Returns the processors of the model, with the markers of the tokenizer; None for one that
    reads texts only.

    Raises MediaError for a class that is not supported and a tokenizer that lacks a token,
    ModelError as `stored_processors`.
    """
    stored = stored_processors(model)
    return None if stored is None else stored.processors(tokenizer, f"model {model.source}")


def preset_changes(model: ModelOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the keys to change in the configuration of a preset: those of the run, and the ids
    that the tokenizer has for placeholders, such as `image_token_id`."""
    preset = _preset(model)
    return model.changes | ({} if preset is None else tokens.ids(preset[0], tokenizer))


def write_files(model: ModelOptions, tokenizer: Tokenizer, directory: Path) -> None:
    """Completes a saved directory of a model with towers, to which weights, tokenizer and the files
    of a source have been written: with the processor of a preset, and with the tokenizer's ids of
    placeholders in config.json."""
    if (preset := _preset(model)) is not None:
        (directory / "processor_config.json").write_text(json.dumps(preset[1], indent=2))
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if (changed := config | tokens.ids(config, tokenizer)) != config:
        file.write_text(json.dumps(changed, indent=2))


def _preset(model: ModelOptions) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns (config.json, processor_config.json) of a preset with towers; None for any other
    source."""
    if model.source not in sources.presets():
        return None
    return sources.preset_processor(model.source, model.changes)
