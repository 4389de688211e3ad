"""Rescaled rotary positions: those of Llama 3.1 and later, for which files have a factor for each
frequency where config.json has the numbers that it follows from, and of files alone linear ones,
YaRN (arXiv 2309.00071) and LongRoPE (arXiv 2402.13753)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from policy.huggingface.file_error import ModelFileError

TENSOR = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
_SCALING = "rope.scaling."
ORIGINAL_LENGTH = f"{_SCALING}original_context_length"
_ATTENTION = f"{_SCALING}attn_factor"
# Keys of files that say what YaRN's parameters of config.json do, or their defaults.
_YARN = {
    "beta_fast": f"{_SCALING}yarn_beta_fast",
    "beta_slow": f"{_SCALING}yarn_beta_slow",
}
_LOW = 1.0
_HIGH = 4.0
_ORIGINAL = 8192
# Those of every model of Llama 3.1 to 3.3; files do not have them.
_CONSTANTS = {
    "low_freq_factor": _LOW,
    "high_freq_factor": _HIGH,
    "original_max_position_embeddings": _ORIGINAL,
}


def factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Returns float32[D/2]: by what each frequency is divided. Wavelengths above 8192 tokens are
    divided by `factor`, those below 2048 stay, and between them 1/factor is interpolated."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def factor_of(rope: Mapping[str, Any]) -> float | None:
    """Returns the factor of the `rope_parameters` of a configuration; None for others than those of
    Llama 3.1."""
    kind = rope.get("rope_type") or rope.get("type")
    if kind != "llama3" or any(rope.get(key) != value for key, value in _CONSTANTS.items()):
        return None
    return float(rope["factor"])


def scaling(stored: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of config.json for the factors of a file; None if all are 1.
    Raises ModelFileError for factors of another kind."""
    factor = float(stored.max())
    if np.all(stored == 1):
        return None
    if stored.shape != (head_dim // 2,) or not np.allclose(
        stored, factors(theta, head_dim, factor), rtol=1e-4
    ):
        raise ModelFileError(
            f"{TENSOR}: its factors are not those of Llama 3.1; rotary positions of another kind are "
            "not read from GGUF"
        )
    return {"rope_type": "llama3", "factor": factor, **_CONSTANTS}


def of_file(
    numbers: Mapping[str, Any], tensors: Mapping[str, Any], hf: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of config.json for a file; None if nothing is rescaled.

    numbers: metadata by key after "ARCHITECTURE.". tensors: by name, as the package gguf has them.
    hf: the other keys of config.json. Raises ModelFileError for a kind that is not read.
    """
    if TENSOR in tensors:
        stored = np.asarray(tensors[TENSOR].data, np.float32)
        return scaling(stored, hf["rope_theta"], hf["head_dim"])
    if LONG in tensors:
        return _longrope(numbers, tensors)
    kind = numbers.get(f"{_SCALING}type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFileError(f"{_SCALING}type: {kind} is not read from GGUF")
    result = {"rope_type": kind, "factor": float(numbers[f"{_SCALING}factor"])}
    if kind == "linear":
        return result
    result["original_max_position_embeddings"] = numbers[ORIGINAL_LENGTH]
    result |= {name: float(numbers[key]) for name, key in _YARN.items() if key in numbers}
    if numbers.get(_ATTENTION, 1.0) != 1.0:
        raise ModelFileError(f"{_ATTENTION}: {numbers[_ATTENTION]} is not read from GGUF")
    return result


def _longrope(numbers: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    names = {"long_factor": LONG, "short_factor": SHORT}
    result: dict[str, Any] = {
        name: [float(each) for each in tensors[tensor].data] for name, tensor in names.items()
    }
    result["rope_type"] = "longrope"
    result["original_max_position_embeddings"] = numbers[ORIGINAL_LENGTH]
    if _ATTENTION in numbers:
        result["attention_factor"] = float(numbers[_ATTENTION])
    return result
