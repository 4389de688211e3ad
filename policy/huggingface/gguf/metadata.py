"""The configuration of a model as the metadata of a GGUF file, in both directions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from policy import families
from policy.config import DecoderConfig
from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf import rope
from policy.huggingface.gguf.architectures import FLOATS, Architecture, of_model_type

_ROPE = "rope.freq_base"
_ROTATED = "rope.dimension_count"
_VALUES = "attention.value_length"
_WINDOW = "attention.sliding_window"
_PREDICTIONS = "nextn_predict_layers"
_SCALAR = "query_pre_attn_scalar"
_DEFAULT_SCALAR = 256  # of the classes of transformers, whose reader takes it from no file
# What programs compute of a key that files have, or would have.
_REASONS = {
    ("phi3", "sliding_window"): " (llama.cpp attends to all tokens, whatever the file says)",
}
# Keys of config.json that say nothing of what a decoder computes.
_OTHER = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range"),
    *("attention_dropout", "_name_or_path", "id2label", "label2id", "output_router_logits"),
)


def metadata(config: DecoderConfig) -> dict[str, Any]:
    """Returns the numbers of a configuration by key of GGUF, after "ARCHITECTURE.".

    Raises ModelFileError for a model type that is not written, and for a decoder of which the
    numbers do not say all.
    """
    hf = families.text_model(json.loads(config.hf))
    architecture = of_model_type(hf["model_type"])
    full = with_defaults(hf)
    result = {key: full[name] for key, name in architecture.keys if full.get(name) is not None}
    head_dim = full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    result["attention.key_length"] = head_dim
    result[_VALUES] = head_dim
    result[_ROTATED] = int(head_dim * _rotated_share(architecture, full))
    if architecture.name == "phi3":
        result.setdefault(_WINDOW, 0)  # llama.cpp needs the key
    result[_ROPE] = float(_rope(full).get("rope_theta") or 10000.0)
    if architecture.derived is not None:
        result |= architecture.derived.numbers(full)
    _check_rope(architecture, full)
    _check_scale(architecture, full)
    _check(config, architecture, result, full)
    return result


def rope_factors(config: DecoderConfig) -> np.ndarray | None:
    """Returns the content of `rope_freqs.weight` for a configuration; None if it has no such
    tensor."""
    full = with_defaults(families.text_model(json.loads(config.hf)))
    scaled = rope.factor_of(_rope(full))
    numbers = metadata(config)
    if scaled is None:
        return None
    return rope.factors(numbers[_ROPE], int(numbers["attention.key_length"]), scaled)


def configuration(
    architecture: Architecture, numbers: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, Any]:
    """Returns the keys of config.json for the metadata of a file, by key after "ARCHITECTURE.".

    tensors: names of the tensors of the file, which say whether the head is the embedding and which
    products have a bias. Scalings of rotary positions are left out. Raises ModelFileError for
    metadata that Duet does not compute.
    """
    hf = {name: numbers[key] for key, name in architecture.keys if key in numbers}
    hf |= architecture.constants
    hf["model_type"] = architecture.model_type
    family = families.find({"model_type": architecture.model_type})
    hf.setdefault("architectures", [family.ARCHITECTURES[0]])
    hf["num_hidden_layers"] -= numbers.get(_PREDICTIONS, 0)
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or numbers.get(_ROTATED) or hf["hidden_size"] // heads
    hf["head_dim"] = head_dim
    hf.setdefault("num_key_value_heads", heads)
    hf["rope_theta"] = float(numbers.get(_ROPE, 10000.0))
    rotated = numbers.get(_ROTATED, head_dim)
    if architecture.rotary is not None:
        hf[architecture.rotary] = rotated / head_dim
    elif rotated != head_dim:
        raise ModelFileError(
            f"{architecture.name}.{_ROTATED}: {rotated} of {head_dim} numbers of a head are rotated, "
            "which is not read from GGUF"
        )
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture.name == "llama":
        hf["attention_bias"] = "blk.0.attn_output.bias" in tensors
        hf["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if architecture.name == "phi3":
        hf["original_max_position_embeddings"] = numbers.get(
            rope.ORIGINAL_LENGTH, hf["max_position_embeddings"]
        )
        hf["sliding_window"] = numbers.get(_WINDOW) or None
    if architecture.largest is not None:
        hf[_SCALAR] = _scalar(architecture, hf)
    if architecture.derived is not None:
        hf |= architecture.derived.config({_ROTATED: rotated, **numbers})
    if "rope_parameters" in hf:  # which say these too
        hf = {key: value for key, value in hf.items() if key not in _IN_ROPE_PARAMETERS}
    return hf


_IN_ROPE_PARAMETERS = ("rope_theta", "partial_rotary_factor")


def _scalar(architecture: Architecture, hf: Mapping[str, Any]) -> int:
    """Returns the number by whose root llama.cpp divides products of queries and keys."""
    if hf["num_hidden_layers"] == architecture.largest:
        return hf["hidden_size"] // hf["num_attention_heads"]
    return hf["head_dim"]


def with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the values that transformers gives to absent keys."""
    from transformers import AutoConfig

    names = dict(of_model_type(hf["model_type"]).keys)
    keys = {key: value for key, value in hf.items() if key != "model_type"}
    for name in (names[key] for key in FLOATS if key in names):
        if keys.get(name) is not None:
            keys[name] = float(keys[name])  # transformers refuses integers
    config = AutoConfig.for_model(hf["model_type"], **keys)
    # A class may know a key by another name too.
    both = {*hf, *names.values()}
    return config.to_dict() | {key: getattr(config, key) for key in both if hasattr(config, key)}


def _rope(full: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary positions of layers with full attention."""
    rope = full.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _rotated_share(architecture: Architecture, full: Mapping[str, Any]) -> float:
    key = architecture.rotary
    return 1.0 if key is None else full.get(key) or _rope(full).get(key) or 1.0


def _check_rope(architecture: Architecture, full: Mapping[str, Any]) -> None:
    """Raises ModelFileError for rotary positions that are rescaled otherwise than those of Llama
    3.1."""
    parameters = _rope(full)
    kind = parameters.get("rope_type", "default")
    if architecture.name == "llama" and rope.factor_of(parameters) is not None:
        return
    if kind != "default":
        raise ModelFileError(
            f"rope_type {kind} of {full['model_type']}: not written as GGUF; transformers takes no "
            "scaling of rotary positions from a file, and would compute without it"
        )


def _check_scale(architecture: Architecture, full: Mapping[str, Any]) -> None:
    """Raises ModelFileError for products of queries and keys that llama.cpp or transformers scale
    otherwise."""
    if architecture.largest is None:
        return
    scalar = full[_SCALAR]
    by_llama = _scalar(architecture, full)
    for program, theirs in (("llama.cpp", by_llama), ("transformers", _DEFAULT_SCALAR)):
        if scalar != theirs:
            raise ModelFileError(
                f"{_SCALAR} {scalar}: a GGUF file of the architecture {architecture.name} has no key "
                f"for it, and {program} takes {theirs} for this model"
            )


def _check(
    config: DecoderConfig,
    architecture: Architecture,
    numbers: Mapping[str, Any],
    full: Mapping[str, Any],
) -> None:
    """Raises ModelFileError if a reader of the numbers gets another decoder."""
    tensors = {
        name
        for name, is_there in (
            ("output.weight", not config.tied_head),
            ("blk.0.attn_output.bias", full.get("attention_bias")),
            ("blk.0.ffn_up.bias", full.get("mlp_bias")),
        )
        if is_there
    }
    read = configuration(architecture, numbers, tensors)
    scaled = rope.factor_of(_rope(full)) if architecture.name == "llama" else None
    if scaled is not None:
        stored = rope.factors(read["rope_theta"], read["head_dim"], scaled)
        read["rope_scaling"] = rope.scaling(stored, read["rope_theta"], read["head_dim"])
    if full["model_type"] == "mistral":
        read["sliding_window"] = None
    other = families.read(read)
    described = replace(
        other, hf=config.hf, family=config.family, initializer_range=config.initializer_range
    )
    text = replace(config, multi_token_prediction=None, image=None, audio=None)
    if described == text:
        return
    theirs = with_defaults(read)
    differing = [
        f"{key} {full[key]!r}{_REASONS.get((architecture.name, key), '')}"
        for key in sorted(full.keys() & theirs.keys() - set(_OTHER))
        if full[key] != theirs[key]
    ]
    raise ModelFileError(
        f"a GGUF file of the architecture {architecture.name} has no key for "
        f"{', '.join(differing) or 'a part of this configuration'}"
    )
