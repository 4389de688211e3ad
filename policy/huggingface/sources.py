"""Reads the configuration of a model from the config.json of a directory or from a preset. Free of
jax."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import yaml

from policy import families
from policy.config import DecoderConfig
from policy.fields import extensions, names
from policy.fields.config_fields import UnsupportedModel
from policy.fields.stored_names import renamed
from policy.huggingface import quantized
from policy.huggingface.gguf.directory import directory_of, is_gguf
from policy.huggingface.quantized import Scheme
from policy.huggingface.tensorfiles import (
    ADAPTER,
    ModelFileError,
    TensorFiles,
    refuse_lfs_pointer,
)

_LOG = logging.getLogger("duet.model")
_ROWS = 4096  # of head and embedding that are compared at once
# Next to this package, in a checkout as in an installed copy (importlib.resources fails on editable
# installs of Python 3.11).
PRESETS = Path(__file__).resolve().parents[2] / "configs" / "models"
QUANTIZATION = "quantization_config"
# The key of a preset with towers that holds the content of processor_config.json.
PROCESSOR = "processor_config"


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML 1.1 writes as 1.0e-6."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def presets() -> list[str]:
    """Returns the names of the architectures in configs/models/."""
    return sorted(
        entry.name.removesuffix(".yml")
        for entry in PRESETS.iterdir()
        if entry.name.endswith(".yml")
    )


def preset(name: str, overrides: dict | None = None, *, media: bool = False) -> DecoderConfig:
    """Reads the architecture in configs/models/NAME.yml (the keys of a Hugging Face configuration),
    with some keys replaced. `media`: with its towers. Raises UnsupportedModel for an unknown name.
    """
    hf = _preset_file(name)
    hf.pop(PROCESSOR, None)
    return families.read(_changed(hf, overrides or {}), media=media)


def preset_processor(name: str, overrides: dict | None = None) -> tuple[dict, dict] | None:
    """Returns (configuration, content of processor_config.json) of a preset with towers for
    pictures or sounds; None for a text model. Raises UnsupportedModel as `preset`."""
    hf = _preset_file(name)
    processor = hf.pop(PROCESSOR, None)
    return None if processor is None else (_changed(hf, overrides or {}), processor)


def _preset_file(name: str) -> dict:
    if name not in presets():
        raise UnsupportedModel(f"no model preset {name!r}; there are {', '.join(presets())}")
    return yaml.load((PRESETS / f"{name}.yml").read_text(), _Loader)


def _changed(hf: dict, overrides: dict) -> dict:
    """Returns a configuration with some keys replaced. In a multimodal one, keys that the wrapper
    has replace those, its sections key by key, and all others are keys of the text model."""
    if not isinstance(hf.get("text_config"), dict):
        return hf | overrides
    outer = dict(hf)
    inner = dict(hf["text_config"])
    for key, value in overrides.items():
        if key.endswith("_config") and isinstance(value, dict) and isinstance(hf.get(key), dict):
            section = inner if key == "text_config" else dict(hf[key])
            section.update(value)
            outer[key] = section
        elif key in hf or key == extensions.KEY:
            outer[key] = value
        else:
            inner[key] = value
    return outer | {"text_config": inner}


def read_object(path: Path) -> dict:
    """Returns the object of a JSON file. Raises ModelFileError for a file that holds none."""
    try:
        refuse_lfs_pointer(path)
        read = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: objects or lists are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    if not isinstance(read, dict):
        raise ModelFileError(
            f"{path}: expected an object with the keys of a configuration, got "
            f"{type(read).__name__}"
        )
    return read


# What PEFT writes into the directory of an adapter.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def has_adapter(directory: str | os.PathLike) -> bool:
    """Tells whether a directory holds an adapter, next to a model or alone."""
    return any((Path(directory) / name).exists() for name in ADAPTER_FILES)


def is_model(directory: str | os.PathLike) -> bool:
    """Tells whether a directory holds a model, or an adapter that names one; or whether it is a GGUF
    file."""
    return is_gguf(directory) or any(
        (Path(directory) / name).is_file() for name in ("config.json", ADAPTER_FILES[0])
    )


def base_of(directory: str | os.PathLike) -> Path:
    """Returns the directory of the weights of a model: of an adapter, that of its base; of a GGUF
    file, one in the cache.

    The base is in the directory of the adapter, or where its `base_model_name_or_path` says: a
    directory, also one relative to that of the adapter, or a model of the hub in the local cache.
    Raises ModelFileError if there is none.
    """
    directory = Path(directory)
    if is_gguf(directory):
        return directory_of(directory)
    if not has_adapter(directory) or _has_weights(directory):
        return directory
    file = directory / ADAPTER_FILES[0]
    hf = read_object(file)
    name = str(hf.get("base_model_name_or_path") or "")
    if not name:
        raise ModelFileError(
            f"{file}: base_model_name_or_path names no base of the adapter; set it to the "
            "directory or the hub name of the model that it was trained over"
        )
    places = (directory / name, Path(name))
    base = next((place for place in places if place.is_dir()), None)
    if base is None:
        base = _in_cache(name, hf.get("revision"))
    if base is not None and has_adapter(base):
        raise ModelFileError(
            f"{file}: the base {base} holds an adapter too; merge that one into its weights first"
        )
    if base is None or not (base / "config.json").is_file():
        raise ModelFileError(
            f"{file}: base_model_name_or_path: {name} is no directory of a model here, from "
            f"{directory} or from {Path.cwd()}, and not in the cache of the hub; set it to the "
            f"directory of the base, or run `hf download {name}`"
        )
    return base


def _has_weights(directory: Path) -> bool:
    """Tells whether a directory has a configuration and weights besides those of an adapter."""
    files = (file.name for file in directory.glob("*.safetensors"))
    return (directory / "config.json").exists() and any(name != ADAPTER for name in files)


def base_name(directory: str | os.PathLike) -> str | None:
    """Returns what a directory with an adapter alone names as its base, `org/name@revision` with a
    revision; None for another directory."""
    directory = Path(directory)
    file = directory / ADAPTER_FILES[0]
    if not file.is_file() or _has_weights(directory):
        return None
    hf = read_object(file)
    name = str(hf.get("base_model_name_or_path") or "")
    revision = hf.get("revision")
    return f"{name}@{revision}" if name and revision else name


def _in_cache(name: str, revision: object) -> Path | None:
    """Returns the directory of a model of the hub in the local cache, or None."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = str(constants.HF_HUB_CACHE)
    chosen = revision if isinstance(revision, str) else None
    try:
        file = try_to_load_from_cache(name, "config.json", cache, chosen)
    except ValueError:  # no name of a repository
        return None
    return Path(file).parent if isinstance(file, str) else None


def _read_json(directory: str | os.PathLike) -> dict:
    path = base_of(directory) / "config.json"
    if not path.exists():
        raise ModelFileError(
            f"{path}: no such file; a model directory holds config.json and *.safetensors"
        )
    return read_object(path)


def scheme(directory: str | os.PathLike) -> Scheme | None:
    """Returns the quantisation of the weights by the `quantization_config` of config.json; None:
    they are not quantised."""
    return _scheme(directory, _read_json(directory))


def _scheme(directory: str | os.PathLike, hf: dict) -> Scheme | None:
    inner = hf.get("text_config")
    section = hf.get(QUANTIZATION) or (inner.get(QUANTIZATION) if isinstance(inner, dict) else None)
    try:
        return quantized.scheme(section)
    except quantized.QuantizationError as error:
        raise UnsupportedModel(
            f"{Path(directory) / 'config.json'}: {QUANTIZATION}: {error}"
        ) from None


def read_hf(directory: str | os.PathLike) -> dict:
    """Reads config.json without its `quantization_config`, since weights are dequantised as they
    are read. Raises ModelFileError for a file that is missing or not a JSON object."""
    hf = _read_json(directory)
    _scheme(directory, hf)
    hf.pop(QUANTIZATION, None)
    if isinstance(hf.get("text_config"), dict):
        hf["text_config"].pop(QUANTIZATION, None)
    return hf


def read_config(
    directory: str | os.PathLike, sections: dict | None = None, *, media: bool = False
) -> DecoderConfig:
    """Reads the decoder of a model directory; `sections` (policy/fields/extensions.py) replace
    sections of its config.json. `media`: with its towers. Of an adapter it is that of its base."""
    directory = base_of(directory)
    hf = read_hf(directory)
    if sections:
        hf[extensions.KEY] = hf.get(extensions.KEY, {}) | sections
    try:
        config = families.read(hf, media=media)
    except families.UnknownModel:
        raise families.UnknownModel(families.nearest_to(hf, _names(directory))) from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{Path(directory) / 'config.json'}: {error}") from None
    if config.tied_head and _has_own_head(os.fspath(directory), config.family, _stamp(directory)):
        return families.read(_untied(hf), media=media)
    return config


def complete(directory: str | os.PathLike, config: DecoderConfig) -> dict:
    """Returns the keys of a directory's config.json, of which `config` describes all or a part,
    with what a reader of that part may have changed: a head of its own, and the sections of
    policy/fields/extensions.py."""
    hf = read_hf(directory)
    hf |= {key: value for key, value in json.loads(config.hf).items() if key == extensions.KEY}
    tied = families.read(hf).tied_head
    return _untied(hf) if tied and not config.tied_head else hf


def _untied(hf: dict) -> dict:
    """Returns a configuration whose head is not the embedding, in all sections that hold a text
    model."""
    parts = [getattr(families.get(name), "PART", "text_config") for name in families.known()]
    inner = {
        key: _untied(hf[key]) for key in {"text_config", *parts} if isinstance(hf.get(key), dict)
    }
    return hf | {"tie_word_embeddings": False} | inner


def _stamp(directory: str | os.PathLike) -> tuple[tuple[str, int, int], ...]:
    """Returns names, sizes and times of a directory's weight files."""
    files = sorted(
        file for end in ("*.safetensors", "*.gguf") for file in Path(directory).glob(end)
    )
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@functools.lru_cache(maxsize=64)
def _has_own_head(directory: str, family_name: str, stamp: tuple) -> bool:
    """Returns whether the files hold a head that differs from the embedding, in size or in a
    number, and warns then, once for the files of this `stamp`: a run reads its configuration
    several times."""
    family = families.get(family_name)
    top = getattr(family, "TOP", names.TOP)
    if "lm_head" not in top:
        return False
    try:
        files = TensorFiles(directory, renamed(family), scheme(directory))
    except ModelFileError:  # whoever reads the weights says so
        return False
    head = top["lm_head"].name
    embedding = top["embed_tokens"].name
    shape = files.shape(embedding)
    if head not in files or shape is None:
        return False
    starts = range(0, shape[0], _ROWS)
    if files.shape(head) == shape and all(
        _equal_rows(files, head, embedding, shape, start) for start in starts
    ):
        return False
    _LOG.warning(
        "%s: tie_word_embeddings is true, but the files hold a head that is not the embedding. "
        "The head is read, as transformers does; what is saved has tie_word_embeddings: false",
        directory,
    )
    return True


def _equal_rows(
    files: TensorFiles, head: str, embedding: str, shape: tuple[int, ...], start: int
) -> bool:
    rows = (slice(start, start + _ROWS), slice(None))
    return np.array_equal(files.read(head, shape, rows), files.read(embedding, shape, rows))


def _names(directory: str | os.PathLike) -> list[str]:
    """Returns the names of the tensors of a model directory, none if its files cannot be read."""
    try:
        return sorted(TensorFiles(directory).unread)
    except ModelFileError:
        return []


def classifier(directory: str | os.PathLike) -> DecoderConfig:
    """Reads the decoder of a sequence classification model. Raises UnsupportedModel if it has
    several labels."""
    hf = read_hf(directory)
    labels = len(hf.get("id2label") or range(hf.get("num_labels") or 2))
    if base_of(directory) != Path(directory) and "id2label" not in hf:
        labels = 1  # the base of an adapter has no labels; the score of the adapter says how many
    if labels != 1:
        raise UnsupportedModel(
            f"{Path(directory) / 'config.json'}: a model of {labels} labels; a reward model has "
            "one (num_labels: 1)"
        )
    return trunk(families.read(hf))


def trunk(config: DecoderConfig) -> DecoderConfig:
    """Removes output projection and prediction modules, and names the class of transformers'
    sequence classification model, unless only the old name identifies the family."""
    hf = json.loads(config.hf) | {"tie_word_embeddings": True}
    sections = {
        name: part
        for name, part in hf.pop(extensions.KEY, {}).items()
        if name != "multi_token_prediction"
    }
    hf |= {extensions.KEY: sections} if sections else {}
    ending = "(ForCausalLM|ForConditionalGeneration|LMHeadModel)$"
    names = [
        re.sub(ending, "ForSequenceClassification", name) for name in hf.get("architectures") or ()
    ]
    renamed = hf | {"architectures": names}
    try:
        same = families.find(renamed) is families.find(hf)
    except UnsupportedModel:
        same = False
    return families.read(renamed if same else hf)
