"""A GGUF file as a model directory: config.json and the tokenizer in the forms of Hugging Face,
next to a link to the file, whose weights are read where they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf.tensors import GgufFile, opened
from policy.huggingface.gguf.vocabulary import tokenizer_json

SUFFIX = ".gguf"
FILE = "model.gguf"
_VERSION = 2  # of what is derived from a file
_TOKENIZER = "tokenizer.ggml."
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a path is that of a GGUF file."""
    return Path(path).suffix == SUFFIX and Path(path).is_file()


def directory_of(path: str | os.PathLike, folder: Path | None = None) -> Path:
    """Returns the directory of a GGUF file, which is in `folder`, by default the cache, and written
    if it is not there.

    Raises ModelFileError for a file that is damaged, or of a model or tokenizer that Duet does not
    read.
    """
    file = Path(path).resolve()
    status = file.stat()
    return _cached(file, status.st_size, status.st_mtime_ns, folder or cache())


def cache() -> Path:
    """Returns the folder with the directories of GGUF files."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "duet-rl" / "gguf"


def _cached(file: Path, size: int, time: int, folder: Path) -> Path:
    key = hashlib.sha256(f"{_VERSION} {file} {size} {time}".encode()).hexdigest()[:24]
    directory = folder / key
    if (directory / FILE).exists():
        return directory
    content = _files(opened(file))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder, prefix=f"{key}."))
        for name, text in content.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        (unfinished / FILE).symlink_to(file)
        _publish(unfinished, directory)
    except OSError as error:
        raise ModelFileError(
            f"{file}: its configuration and tokenizer cannot be written to {folder}: {error}. Set "
            "XDG_CACHE_HOME to a folder with room"
        ) from None
    return directory


def _publish(unfinished: Path, directory: Path) -> None:
    """Renames a folder, unless another process has written the same one."""
    try:
        unfinished.rename(directory)
    except OSError:
        shutil.rmtree(unfinished)
        if not (directory / FILE).exists():
            raise


def _files(file: GgufFile) -> dict[str, str]:
    """Returns the texts of a model directory, by name."""
    fields = {
        key.removeprefix(_TOKENIZER): field.contents()
        for key, field in file.fields.items()
        if key.startswith(_TOKENIZER)
    }
    ids = {key: fields[name] for key, name in _ids(fields).items()}
    stops = [fields[key] for key in _STOPS if key in fields]
    config = {**file.configuration(), **ids, "dtype": "float32"}
    if stops:
        config["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    generation = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if key in config
    }
    content = {"config.json": config, "generation_config.json": generation}
    if "tokens" not in fields:
        return _as_text(content)
    content["tokenizer.json"] = tokenizer_json(fields, file.path)
    content["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: fields["tokens"][fields[key]] for name, key in _SPECIAL.items() if key in fields},
    }
    texts = _as_text(content)
    template = file.fields.get("tokenizer.chat_template")
    if template is not None:
        texts["chat_template.jinja"] = template.contents()
    return texts


def _ids(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns key of config.json -> key of GGUF, of the ids of tokens that a file has."""
    pairs = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    return {key: name for key, name in pairs.items() if name in fields}


def _as_text(content: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        for name, value in content.items()
    }
