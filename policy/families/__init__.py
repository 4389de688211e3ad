"""Decoder families, one file each, found by listing this folder. Free of jax.

A family file holds ARCHITECTURES and MODEL_TYPES (which Hugging Face configurations are its own), `read(hf) ->
DecoderConfig`, NAMES (how its weights are stored; policy/huggingface/names.py) and DEFAULTS (values of absent keys; here the class
of transformers rules). Optional: TOP and LAYER_PREFIX in the place of those of policy/huggingface/names.py; PREFIXES, pairs of the start of
a stored name and what the tables call it; SKIP, patterns of stored tensors that are not read; SKIP_EXTRA_LAYERS, True where
layers past num_hidden_layers are not read either; PASSED_OVER, the start of the names of such layers that transformers passes
over in a file; `empty_tensors(hf)`, names and shapes of tensors without elements
that transformers expects to find.

A multimodal configuration (with a `text_config`) is read as its text model. ARCHITECTURES then also holds the wrapper's class,
after the text classes, which stand in the order of their MODEL_TYPES.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from policy.config import DecoderConfig
from policy.huggingface import extensions
from policy.huggingface.hf import UnsupportedModel


def known() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    return importlib.import_module(f"policy.families.{name}")


def find(hf: dict) -> ModuleType:
    """The family of a Hugging Face configuration: by `architectures` first, by `model_type` second."""
    modules = [get(name) for name in known()]
    for key, attribute in (("architectures", "ARCHITECTURES"), ("model_type", "MODEL_TYPES")):
        value = hf.get(key)
        wanted = {value} if isinstance(value, str) else set(value or ())
        for module in modules:
            if wanted & set(getattr(module, attribute)):
                return module
    types = sorted(t for module in modules for t in module.MODEL_TYPES)
    raise UnsupportedModel(
        f"no family for architectures={hf.get('architectures')}, model_type={hf.get('model_type')!r}; "
        f"known model types: {', '.join(types)}"
    )


def text_model(hf: dict) -> dict:
    """The configuration of the text model in that of a multimodal one; any other as it is."""
    inner = hf.get("text_config")
    if not isinstance(inner, dict):
        return hf
    try:
        family = find(hf)
    except UnsupportedModel as unknown:
        try:
            family = find(inner)
        except UnsupportedModel:
            raise unknown from None
    kind = inner.get("model_type")
    number = family.MODEL_TYPES.index(kind) if kind in family.MODEL_TYPES else 0
    outer = {extensions.KEY: hf[extensions.KEY]} if extensions.KEY in hf else {}
    # The class of the wrapper ties the head by its own key; transformers also writes the text model's default into text_config.
    tied = {key: hf[key] for key in ("tie_word_embeddings",) if hf.get(key) is not None}
    names = {"architectures": [family.ARCHITECTURES[number]], "model_type": family.MODEL_TYPES[number]}
    return outer | inner | tied | names


def read(hf: dict) -> DecoderConfig:
    """The decoder that a Hugging Face configuration describes, with the parts that policy/huggingface/extensions.py adds. Raises
    UnsupportedModel with the key that is missing or unknown."""
    hf = text_model(hf)
    module = find(hf)
    try:
        return extensions.extend(module.read(hf), hf)
    except KeyError as missing:
        raise UnsupportedModel(f"{hf.get('model_type')}: the configuration lacks {missing}") from None
