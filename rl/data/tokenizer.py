"""Reads the tokenizer of a run. Imports no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policy.huggingface.tensorfiles import ModelFileError
from rl.config.model import TokenizerOptions
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.errors import ConfigError, ModelError
from rollout.text.tokenizer import BUILT_IN, load_tokenizer, stop_ids


def read_tokenizer(config: RunConfig) -> tuple[Any, tuple[int, ...]]:
    """Returns (tokenizer of the run, token ids that end a completion).

    A built-in tokenizer gets the special tokens of a model that reads pictures or sounds, after all others.

    Raises ConfigError for a tokenizer that cannot be used, ModelError for a name on the hub that cannot be read.
    """
    directory = models.directory(config.model.source)
    try:
        options = config.tokenizer or TokenizerOptions()
        if options.source is None:
            tokenizer = load_tokenizer(directory or config.model.source, chat_template=options.chat_template)
        else:
            tokenizer = load_tokenizer(
                models.directory(options.source, part="tokenizer") or options.source,
                options.alphabet,
                options.chat_template,
                towers.media_tokens(config.model) if options.source in BUILT_IN else None,
            )
            if options.source in BUILT_IN:
                _refuse_in_place_of_its_own(tokenizer, options.source, config.model.source, directory)
        return tokenizer, stop_ids(tokenizer, directory)
    except ModelFileError as error:
        raise ModelError(f"model {config.model.source}: {error}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"tokenizer: {error}") from None


def _refuse_in_place_of_its_own(tokenizer: Any, name: str, model: str, directory: Path | None) -> None:
    """Raises ConfigError for a built-in tokenizer whose ids are not those that the model's weights know."""
    if directory is None or not any((directory / file).is_file() for file in models.TOKENIZER_FILES):
        return
    own = load_tokenizer(directory).get_vocab()
    if any(own.get(token) != number for token, number in tokenizer.get_vocab().items()):
        raise ConfigError(
            f"tokenizer: {name} in place of the tokenizer of {model}, whose weights know other ids; leave `tokenizer` "
            "out of the file, or set tokenizer=null"
        )
