"""Decoder families, one file each; listing this folder gives their names. Free of jax.

A family file defines:
- ARCHITECTURES and MODEL_TYPES: the Hugging Face configurations of the family.
- `read(stored) -> DecoderConfig`.
- NAMES: how its weights are stored (policy/fields/names.py).
- DEFAULTS: the values of absent keys, as in the class of transformers.

Optional:
- MODEL_TYPE_ALIASES: model types that transformers does not have -> the one of MODEL_TYPES that
  reads them.
- TOP and LAYER_PREFIX: replacements for the names in policy/fields/names.py.
- PREFIXES: pairs of a prefix of stored names and its replacement in the tables.
- SKIP: patterns of stored tensors that belong to parts of the model that the decoder does not have.
- SKIP_EXTRA_LAYERS: True if layers past num_hidden_layers are not read either.
- PASSED_OVER: a pattern for the start of the names of such layers that transformers ignores in a
  file.
- `unread(config)`: patterns of stored tensors that no part of the model needs.
- `empty_tensors(hf)`: names and shapes of tensors without elements that transformers expects.
- `derived_tensors(config)`: tensors of integers that follow from the configuration, by stored name:
  they are written, and those of a file must be equal.
- `table_shards(hf)`: into how many tensors a weight is cut whose stored name counts shards.
- PART: the key under which a configuration of several models has the one that is read and written.
  Its class is the first of ARCHITECTURES.
- WRAPPED: pair of a prefix in the tables and its replacement in the files of a multimodal model.
  `read` then gets the complete multimodal configuration, which is also written.
- `towers(stored)`: the towers of a complete multimodal configuration, by field of DecoderConfig,
  "image" or "audio".
- TOWERS: the name table of each tower, by that field.
- MULTIMODAL: pairs as in WRAPPED, for the files of a model with its towers; the first that fits is
  taken.
- MEMORY_PREFIXES: pairs as in MULTIMODAL, for the modules of transformers 5, where they have other
  names than files and PEFT does not rename adapters.
- CONVERTED_BY_PEFT: of experts that have a tensor each in files and one in the memory of
  transformers 5, the last words of their modules, if PEFT converts adapters from one to the other.
- PEFT_SWAPS_EXPERTS: True if the experts of transformers are one tensor [experts, in, out] without
  its mark `is_transposed`, so that PEFT since 0.19 takes inputs for outputs.

A multimodal configuration has a `text_config`, or is flat: the keys of its text model stand next to
`vision_config`. One with a `text_config` and a family without WRAPPED is read as its text model.
ARCHITECTURES then also holds the wrapper's class, after the text classes, which are in the order of
their MODEL_TYPES.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

from policy.config import DecoderConfig, LayerSpec, Router
from policy.fields import extensions, nearest
from policy.fields.config_fields import UnsupportedModel, wrong_value
from policy.fields.field_types import wrong_fields


class UnknownModel(UnsupportedModel):
    """Raised for a configuration that no family has."""


def known() -> list[str]:
    """Returns the names of all families."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """Returns the module of a family. Raises ModuleNotFoundError for a name that is no file of this
    folder."""
    return importlib.import_module(f"policy.families.{name}")


def model_types(family: ModuleType) -> tuple[str, ...]:
    """Returns the model types that a family reads."""
    return (*family.MODEL_TYPES, *getattr(family, "MODEL_TYPE_ALIASES", ()))


def find(hf: dict) -> ModuleType:
    """Returns the family of a Hugging Face configuration, by `architectures` first and `model_type`
    second. Raises UnknownModel if no family has either."""
    family = _claiming(hf)
    if family is None:
        raise UnknownModel(nearest_to(hf))
    return family


def _claiming(hf: dict) -> ModuleType | None:
    """Returns the family of a configuration as `find`; None if no family has it."""
    modules = [get(name) for name in known()]
    claimed = {
        "architectures": [set(module.ARCHITECTURES) for module in modules],
        "model_type": [set(model_types(module)) for module in modules],
    }
    for key, names in claimed.items():
        value = hf.get(key)
        requested = {value} if isinstance(value, str) else set(value or ())
        for module, own in zip(modules, names, strict=True):
            if requested & own:
                return module
    return None


def nearest_to(hf: dict, names: Iterable[str] = ()) -> str:
    """Returns what to say of a model that no family has, by its configuration and the names of its
    tensors."""
    return nearest.describe(hf, [get(name) for name in known()], names)


def single_model(hf: dict) -> dict:
    """Returns the configuration of the model that is read from one of several models (PART of the
    family); any other configuration unchanged."""
    family = _claiming(hf)
    inner = hf.get(getattr(family, "PART", ""))
    if family is None or not isinstance(inner, dict):
        return hf
    outer = {extensions.KEY: hf[extensions.KEY]} if extensions.KEY in hf else {}
    return (
        inner
        | outer
        | {"architectures": [family.ARCHITECTURES[0]], "model_type": family.MODEL_TYPES[0]}
    )


def text_model(hf: dict) -> dict:
    """Returns the configuration of the text model inside a multimodal one; any other configuration
    unchanged, and the multimodal ones of families that read them."""
    hf = single_model(hf)
    inner = hf.get("text_config")
    if not isinstance(inner, dict):
        return hf
    family = _claiming(hf) or _claiming(inner)
    if family is None:
        raise UnknownModel(nearest_to(hf | inner))
    if hasattr(family, "WRAPPED"):
        return hf
    number = _text_class(family, inner)
    outer = {extensions.KEY: hf[extensions.KEY]} if extensions.KEY in hf else {}
    # The class of the wrapper ties the head by its own key; transformers also writes the text
    # model's default into text_config.
    tied = {key: hf[key] for key in ("tie_word_embeddings",) if hf.get(key) is not None}
    names = {
        "architectures": [family.ARCHITECTURES[number]],
        "model_type": family.MODEL_TYPES[number],
    }
    return outer | inner | tied | names


def _text_class(family: ModuleType, inner: dict) -> int:
    """Returns which of the text classes of a family a text configuration names, by `architectures`
    first and `model_type` second; 0 if it names none."""
    types = family.MODEL_TYPES
    classes = family.ARCHITECTURES
    for name in inner.get("architectures") or ():
        if name in classes and name.endswith("ForCausalLM"):
            return classes.index(name)
    kind = inner.get("model_type")
    kind = getattr(family, "MODEL_TYPE_ALIASES", {}).get(kind, kind)
    return types.index(kind) if kind in types else 0


# What a family raises for values of a wrong type or size.
_FAULTS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def read(hf: dict, *, media: bool = False) -> DecoderConfig:
    """Reads the decoder that a Hugging Face configuration describes, with the parts that
    policy/fields/extensions.py adds. `media`: with the towers of a multimodal one. Raises
    UnsupportedModel with the key that is missing, unknown or has a wrong value, and if there is no
    tower to read."""
    try:
        return _read(hf, media)
    except UnsupportedModel:
        raise
    except _FAULTS as error:

        def reads(changed: dict) -> bool:
            try:
                _read(changed, media)
            except _FAULTS:
                return False
            return True

        raise UnsupportedModel(wrong_value(hf, error, reads)) from error


def _read(hf: dict, media: bool) -> DecoderConfig:
    """Reads a decoder as `read`, but raises any error of Python for values of a wrong type or
    size."""
    hf = single_model(hf)
    text = text_model(hf)
    module = find(text)
    try:
        config = extensions.extend(module.read(text), text)
        if media:
            is_multimodal = any(
                isinstance(hf.get(key), dict) for key in ("text_config", "vision_config")
            )
            if not (is_multimodal and hasattr(module, "towers")):
                raise UnsupportedModel(
                    f"{hf.get('model_type')}: a model without towers for pictures and sounds"
                )
            config = replace(config, hf=json.dumps(hf, sort_keys=True), **module.towers(hf))
    except KeyError as missing:
        raise UnsupportedModel(
            f"{text.get('model_type')}: the configuration lacks {missing}"
        ) from None
    if not config.layers:
        raise ValueError("a decoder without layers")
    if wrong := next(wrong_fields(config), None):
        raise ValueError(wrong)
    if wrong := _wrong_sizes(config, text):
        raise UnsupportedModel(f"{text.get('model_type')}: {wrong}")
    return config


def _wrong_sizes(config: DecoderConfig, text: dict) -> str | None:
    """Returns which sizes do not go with each other, by the keys that say them, or None: heads that
    cannot be shared, rotations of an odd number of dimensions, groups of experts."""
    modules = config.multi_token_prediction
    for layer in dict.fromkeys((*config.layers, *([modules.layer] if modules else ()))):
        if wrong := _wrong_heads(layer, text) or (layer.moe and _wrong_groups(layer.moe.router)):
            return wrong
    return None


def _wrong_heads(layer: LayerSpec, text: dict) -> str | None:
    attention = layer.attention
    if attention is not None and attention.heads % attention.kv_heads:
        key = _key_of(text, "key_value_heads", attention.kv_heads) or "num_key_value_heads"
        return f"{key}: {attention.kv_heads} does not divide num_attention_heads, {attention.heads}"
    if odd := next((rope.dim for rope in layer.ropes if rope.dim % 2), None):
        if key := _key_of(text, "head_dim", odd):
            return f"{key}: {odd} is odd, and rotary positions turn pairs of dimensions"
        where = "a share partial_rotary_factor of head_dim (hidden_size / num_attention_heads)"
        return (
            f"{where}: {odd} dimensions, an odd number, and rotary positions turn pairs of "
            "dimensions"
        )
    return None


def _wrong_groups(router: Router) -> str | None:
    experts = router.experts
    groups = router.groups
    kept = router.topk_groups
    if router.experts_per_token > experts:
        return f"num_experts_per_tok: {router.experts_per_token} of {experts} experts"
    if groups == 1:
        return None
    if experts % groups or (router.group_score == "top2" and experts < 2 * groups):
        return (
            f"n_group: {groups} groups of equal size, of two experts or more, cannot be made "
            f"of {experts} experts"
        )
    if kept > groups:
        return f"topk_group: {kept} of {groups} groups (n_group)"
    return None


def _key_of(text: dict, ending: str, value: int) -> str | None:
    """Returns the key with this ending and value, or None."""
    return next((key for key, each in text.items() if key.endswith(ending) and each == value), None)
