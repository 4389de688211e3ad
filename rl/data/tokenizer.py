"""Reads the tokenizer of a run. Imports no jax."""

from __future__ import annotations

from typing import Any

from policy.huggingface.tensorfiles import ModelFileError
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
        if config.tokenizer is None:
            tokenizer = load_tokenizer(directory or config.model.source)
        else:
            source = config.tokenizer.source
            tokenizer = load_tokenizer(
                models.directory(source, part="tokenizer") or source,
                config.tokenizer.alphabet,
                config.tokenizer.chat_template,
                towers.media_tokens(config.model) if source in BUILT_IN else None,
            )
        return tokenizer, stop_ids(tokenizer, directory)
    except ModelFileError as error:
        raise ModelError(f"model {config.model.source}: {error}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"tokenizer: {error}") from None
