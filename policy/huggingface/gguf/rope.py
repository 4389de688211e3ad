"""Rotary positions of Llama 3.1 and later: files have a factor for each frequency, in
`rope_freqs.weight`, where config.json has the numbers that it follows from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from policy.huggingface.file_error import ModelFileError

TENSOR = "rope_freqs.weight"
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
