"""What a model is: its configuration, from the config.json of a directory or from a preset. Free of jax."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from policy import families
from policy.config import DecoderConfig
from policy.huggingface import extensions, quantized
from policy.huggingface.hf import UnsupportedModel
from policy.huggingface.quantized import Scheme
from policy.huggingface.tensorfiles import ModelFileError

# Beside this package, in a checkout as in an installed copy (importlib.resources fails on editable installs of Python 3.11).
PRESETS = Path(__file__).resolve().parents[2] / "configs" / "models"
QUANTIZATION = "quantization_config"


class _Loader(yaml.SafeLoader):
    """Also reads 1e-6 as a number; YAML 1.1 wants 1.0e-6."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def presets() -> list[str]:
    """Names of the architectures in configs/models/."""
    return sorted(entry.name.removesuffix(".yml") for entry in PRESETS.iterdir() if entry.name.endswith(".yml"))


def preset(name: str, overrides: dict | None = None) -> DecoderConfig:
    """The architecture in configs/models/NAME.yml (the keys of a Hugging Face configuration), with some keys
    replaced."""
    if name not in presets():
        raise UnsupportedModel(f"no model preset {name!r}; there are {', '.join(presets())}")
    text = (PRESETS / f"{name}.yml").read_text()
    return families.read(yaml.load(text, _Loader) | (overrides or {}))


def _read_json(directory) -> dict:
    path = Path(directory) / "config.json"
    try:
        hf = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text: {error}") from None
    if not isinstance(hf, dict):
        raise ModelFileError(f"{path}: expected an object with the keys of a configuration, found {type(hf).__name__}")
    return hf


def scheme(directory) -> Scheme | None:
    """How the weights of a directory are quantised, by the `quantization_config` of its config.json; None: they are not."""
    return _scheme(directory, _read_json(directory))


def _scheme(directory, hf: dict) -> Scheme | None:
    inner = hf.get("text_config")
    found = hf.get(QUANTIZATION) or (inner.get(QUANTIZATION) if isinstance(inner, dict) else None)
    try:
        return quantized.scheme(found)
    except quantized.QuantizationError as error:
        raise UnsupportedModel(f"{Path(directory) / 'config.json'}: {QUANTIZATION}: {error}") from None


def read_hf(directory) -> dict:
    """config.json of a model directory, without its `quantization_config`: weights are dequantised as they are read."""
    hf = _read_json(directory)
    _scheme(directory, hf)
    hf.pop(QUANTIZATION, None)
    if isinstance(hf.get("text_config"), dict):
        hf["text_config"].pop(QUANTIZATION, None)
    return hf


def read_config(directory, sections: dict | None = None) -> DecoderConfig:
    """The decoder in a model directory; `sections` (policy/huggingface/extensions.py) take the place of those of its config.json."""
    hf = read_hf(directory)
    if sections:
        hf[extensions.KEY] = hf.get(extensions.KEY, {}) | sections
    return families.read(hf)


def classifier(directory) -> DecoderConfig:
    """The decoder of the sequence classification model in a directory. Raises UnsupportedModel where it has several labels."""
    hf = read_hf(directory)
    labels = len(hf.get("id2label") or range(hf.get("num_labels") or 2))
    if labels != 1:
        raise UnsupportedModel(
            f"{Path(directory) / 'config.json'}: a model of {labels} labels; a reward model has one (num_labels: 1)"
        )
    return trunk(families.read(hf))


def trunk(config: DecoderConfig) -> DecoderConfig:
    """The decoder without output projection and prediction modules, under the class name of transformers' sequence classification
    model, unless the family cannot be told without the old one."""
    hf = json.loads(config.hf) | {"tie_word_embeddings": True}
    sections = {name: part for name, part in hf.pop(extensions.KEY, {}).items() if name != "multi_token_prediction"}
    hf |= {extensions.KEY: sections} if sections else {}
    ending = "(ForCausalLM|ForConditionalGeneration|LMHeadModel)$"
    names = [re.sub(ending, "ForSequenceClassification", name) for name in hf.get("architectures") or ()]
    renamed = hf | {"architectures": names}
    try:
        same = families.find(renamed) is families.find(hf)
    except UnsupportedModel:
        same = False
    return families.read(renamed if same else hf)
