"""Reads the tokenizer of a run. Imports no jax."""

from __future__ import annotations

from typing import Any

from rl.config.run import RunConfig
from rl.data import models
from rl.errors import ConfigError
from rollout.text.tokenizer import load_tokenizer, stop_ids


def read_tokenizer(config: RunConfig) -> tuple[Any, tuple[int, ...]]:
    """Returns (tokenizer of the run, token ids that end a completion).

    Raises ConfigError for a tokenizer that cannot be used, ModelError for a name on the hub that cannot be read.
    """
    directory = models.directory(config.model.source)
    try:
        if config.tokenizer is None:
            tokenizer = load_tokenizer(directory or config.model.source)
        else:
            source = config.tokenizer.source
            tokenizer = load_tokenizer(
                models.directory(source, part="tokenizer") or source,
                config.tokenizer.alphabet,
                config.tokenizer.chat_template,
            )
        return tokenizer, stop_ids(tokenizer, directory)
    except (ValueError, OSError) as error:
        raise ConfigError(f"tokenizer: {error}") from None
