"""Reads the tokenizer of a run. Imports no jax."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shutil
from pathlib import Path
from typing import Any

from policy.huggingface.tensorfiles import ModelFileError
from rl.config.model import ChatTemplateOptions, TokenizerOptions
from rl.config.run import RunConfig
from rl.data import models, towers
from rl.errors import ConfigError, ModelError
from rollout.text.chat import with_variables
from rollout.text.interface import Tokenizer
from rollout.text.tokenizer import BUILT_IN, load_tokenizer, stop_ids

_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"


def read_tokenizer(config: RunConfig) -> tuple[Any, tuple[int, ...]]:
    """Returns (tokenizer of the run, token ids that end a completion).

    A built-in tokenizer gets the special tokens of a model that reads pictures or sounds, after all
    others.

    Raises ConfigError for a tokenizer that cannot be used, ModelError for a name on the hub, and
    for files of the model, that cannot be read.
    """
    directory = _of_model(config)
    try:
        options = config.tokenizer or TokenizerOptions()
        template = options.chat_template or ChatTemplateOptions()
        if options.source is None:
            tokenizer = load_tokenizer(
                directory or config.model.source, chat_template=template.file
            )
        else:
            tokenizer = load_tokenizer(
                models.directory(options.source, part="tokenizer") or options.source,
                options.alphabet,
                template.file,
                towers.media_tokens(config.model) if options.source in BUILT_IN else None,
            )
            if options.source in BUILT_IN:
                _refuse_in_place_of_its_own(
                    tokenizer, options.source, config.model.source, directory
                )
        return _with_template_options(tokenizer, options), stop_ids(tokenizer, directory)
    except ModelFileError as error:
        raise ModelError(f"model {config.model.source}: {error}") from None
    except (ValueError, OSError) as error:
        if directory is not None and (config.tokenizer is None or config.tokenizer.source is None):
            models.check_files(
                config.model.source, config.model.sections
            )  # transformers reads config.json, too
            raise ModelError(f"model {config.model.source}: {error}") from None
        raise ConfigError(f"tokenizer: {error}") from None


def _of_model(config: RunConfig) -> Path | None:
    """Returns the directory of the tokenizer of the model; None for a preset."""
    directory = models.directory(config.model.source)
    return None if directory is None else models.text_directory(directory)


def _directory(config: RunConfig, options: TokenizerOptions) -> Path | None:
    """Returns the directory of the tokenizer of the run; None if it has none."""
    if options.source is None:
        return _of_model(config)
    return models.directory(options.source, part="tokenizer")


def _with_template_options(tokenizer: Any, options: TokenizerOptions) -> Any:
    """Returns the tokenizer with the variables and the date of its chat template."""
    variables = options.chat_template.variables if options.chat_template else {}
    tokenizer = with_variables(tokenizer, **variables)
    templates = tokenizer.chat_template
    if options.date is None or not templates:
        return tokenizer
    day = datetime.date.fromisoformat(options.date)
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: _at(day, text) for name, text in templates.items()}
    else:
        tokenizer.chat_template = _at(day, templates)
    return tokenizer


_NOW = re.compile(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")


def _at(day: datetime.date, template: str) -> str:
    """Writes a day in place of each call of `strftime_now`. No variable can take the place of that
    function of transformers, because transformers hands only plain data to templates."""
    return _NOW.sub(lambda call: json.dumps(day.strftime(call[1] or call[2] or "")), template)


def reads_date(config: RunConfig) -> bool:
    """Returns whether the chat template of a run may write the date of today."""
    options = config.tokenizer or TokenizerOptions()
    if options.chat_template is not None and options.chat_template.file is not None:
        files = [Path(options.chat_template.file)]
    elif options.source in BUILT_IN:
        return False
    else:
        directory = _directory(config, options)
        files = (
            []
            if directory is None
            else [directory / name for name in (*models.TEMPLATE_FILES, _CONFIG)]
        )
    return any(
        "strftime_now" in file.read_text(encoding="utf-8-sig") for file in files if file.is_file()
    )


def history_of(config: RunConfig) -> str:
    """Returns what becomes of turns that the chat template rewrites, as in
    `chat.encode_conversation`."""
    options = config.tokenizer and config.tokenizer.chat_template
    return options.history if options else "template"


def write_tokenizer(config: RunConfig, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer of a run into the directory of a model that it trained.

    The files of a tokenizer's directory are copied as they are, since a program that reads them
    reads their copies. A chat template of the run replaces theirs. A built-in tokenizer, and one
    whose directory is gone by now, is written in the form of transformers 4, which later versions
    read too.
    """
    options = config.tokenizer or TokenizerOptions()
    source = None
    if options.source not in BUILT_IN:
        with contextlib.suppress(ModelError):
            source = _directory(config, options)
    if source is None or not (source / _CONFIG).is_file():
        tokenizer.save_pretrained(str(directory))
        _as_transformers_4(directory / _CONFIG)
        return
    models.copy_files(source, (*models.TOKENIZER_FILES, *models.VOCABULARY_FILES), directory)
    if options.chat_template is None or options.chat_template.file is None:
        models.copy_files(source, models.TEMPLATE_FILES, directory)
        if (source / _MORE_TEMPLATES).is_dir():
            shutil.copytree(
                source / _MORE_TEMPLATES, directory / _MORE_TEMPLATES, dirs_exist_ok=True
            )
        return
    template = tokenizer.chat_template
    if options.date is not None:  # the tokenizer's has the date in it
        template = Path(options.chat_template.file).read_text(encoding="utf-8")
    assert isinstance(template, str)  # a file holds one template
    (directory / models.TEMPLATE_FILES[0]).write_text(template, encoding="utf-8")
    keys = json.loads((directory / _CONFIG).read_text(encoding="utf-8-sig"))
    if "chat_template" in keys:
        models.write_keys(directory / _CONFIG, keys | {"chat_template": template})


def _as_transformers_4(file: Path) -> None:
    """Rewrites a tokenizer_config.json of transformers 5, whose class and special tokens
    transformers 4 does not know."""
    keys = json.loads(file.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        keys.pop(key, None)
    if keys.get("tokenizer_class") == "TokenizersBackend":
        keys["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(keys.get("extra_special_tokens"), list):
        keys["additional_special_tokens"] = keys.pop("extra_special_tokens")
    models.write_keys(file, dict(sorted(keys.items())))


def _refuse_in_place_of_its_own(
    tokenizer: Tokenizer, name: str, model: str, directory: Path | None
) -> None:
    """Raises ConfigError for a built-in tokenizer whose ids are not those that the model's weights
    know."""
    if directory is None or not any(
        (directory / file).is_file() for file in models.TOKENIZER_FILES
    ):
        return
    own = load_tokenizer(directory).get_vocab()
    if any(own.get(token) != number for token, number in tokenizer.get_vocab().items()):
        raise ConfigError(
            f"tokenizer: {name} in place of the tokenizer of {model}, whose weights know other "
            "ids; leave `tokenizer` out of the file, or set tokenizer=null"
        )
