"""Quantised weights of Hugging Face files. Indexing a weight reads and dequantises that slice only.

`quantization_config` of config.json names the scheme: `fp8`, the block-scaled form of arXiv 2412.19437, section 3.3, or
`mxfp4`, microscaling (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# The 16 values of a 4-bit float with 2 exponent bits and 1 of mantissa (E2M1), by code.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
GROUP = 32  # values that share a scale in MXFP4
METHODS = ("fp8", "mxfp4")

Index = tuple[slice, ...]
View = Callable[[str], "np.ndarray | None"]


class QuantizationError(ValueError):
    """Raised for weights, or a description of them, that cannot be dequantised; the message names them."""


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a file. `block` is the number of rows and columns per scale of fp8; None: one scale per
    tensor."""

    method: str
    block: tuple[int, int] | None = None

    def find(self, name: str, view: View) -> Fp8 | Mxfp4 | None:
        """Returns the tensor `name` if the file (`view`: array by name, None if absent) holds it quantised, else
        None."""
        if self.method == "mxfp4":
            blocks = view(f"{name}_blocks")
            return None if blocks is None else Mxfp4(name, blocks, _required(view, f"{name}_scales"))
        values = view(name)
        if values is None or values.dtype.name != "float8_e4m3fn":
            return None
        return Fp8(name, values, _required(view, f"{name}_scale_inv"), self.block)

    @property
    def skip(self) -> tuple[str, ...]:
        """Patterns of tensors that are not weights: the scales of quantised activations."""
        return (r".*\.activation_scale",) if self.method == "fp8" else ()


def scheme(config: dict | None) -> Scheme | None:
    """Returns the scheme of a `quantization_config`, None without one. Raises QuantizationError if it is not
    supported."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method not in METHODS:
        known = " and ".join(METHODS)
        raise QuantizationError(f"quant_method {method!r} is not supported, only {known}; dequantise the weights first")
    if method == "mxfp4" or config.get("weight_block_size", ...) is None:
        return Scheme(method)
    block = config.get("weight_block_size", [128, 128])
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise QuantizationError(f"weight_block_size {block!r}: expected two positive numbers, rows and columns")
    return Scheme(method, tuple(block))


def _required(view: View, name: str) -> np.ndarray:
    array = view(name)
    if array is None:
        raise QuantizationError(f"missing tensor {name}, the scales of quantised weights")
    return array


class Fp8:
    """A tensor float32[..., O, I]: 8-bit values times the scale of their block; the last blocks may be smaller."""

    def __init__(self, name: str, values: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None):
        self.shape, stored = values.shape, f"{name}_scale_inv has shape {list(scales.shape)}"
        if block is None:
            if scales.size != 1:
                raise QuantizationError(f"{stored}, but without weight_block_size it is one number")
            block, scales = values.shape[-2:], scales.reshape((1,) * len(self.shape))
        expected = (*self.shape[:-2], *(-(-n // b) for n, b in zip(self.shape[-2:], block, strict=True)))
        if scales.shape != expected:
            raise QuantizationError(
                f"{stored}, expected {list(expected)}: one for each block of {block[0]} rows and {block[1]} columns"
            )
        self._values, self._scales, self._block = values, scales, block

    def __getitem__(self, index: Index) -> np.ndarray:
        *leading, rows, columns = (slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True))
        out = self._values[(*leading, rows, columns)].astype(np.float32)
        height, width = self._block
        block_of_column = np.arange(columns.start, columns.stop) // width
        for row in range(rows.start // height, -(-rows.stop // height)):
            scales = self._scales[(*leading, row)].astype(np.float32)[..., block_of_column]
            low, high = max(row * height, rows.start) - rows.start, min((row + 1) * height, rows.stop) - rows.start
            out[..., low:high, :] *= scales[..., None, :]
        return out


class Mxfp4:
    """A tensor float32[..., I, O]: 4-bit floats times 2^(s - 127), one s for 32 values along I. It is stored
    transposed, as `blocks` uint8[..., O, I/32, 16] (two values in a byte, the low half first) and `scales` uint8[...,
    O, I/32]."""

    def __init__(self, name: str, blocks: np.ndarray, scales: np.ndarray):
        *leading, outputs, groups, width = blocks.shape if blocks.ndim > 2 else (0, 0, 0)
        if (
            width != GROUP // 2
            or scales.shape != blocks.shape[:-1]
            or {blocks.dtype.name, scales.dtype.name} != {"uint8"}
        ):
            stored = (
                f"_blocks {blocks.dtype.name}{list(blocks.shape)} and _scales {scales.dtype.name}{list(scales.shape)}"
            )
            raise QuantizationError(
                f"{name}: {stored} must be uint8[..., outputs, inputs / {GROUP}, {GROUP // 2}]"
                " and uint8 without the last axis"
            )
        self.shape = (*leading, groups * GROUP, outputs)
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: Index) -> np.ndarray:
        *leading, inputs, outputs = (slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True))
        groups = slice(inputs.start // GROUP, math.ceil(inputs.stop / GROUP))
        codes = self._blocks[(*leading, outputs, groups)]
        values = np.empty((*codes.shape, 2), np.float32)
        values[..., 0], values[..., 1] = FP4[codes & 15], FP4[codes >> 4]
        exponents = self._scales[(*leading, outputs, groups)].astype(np.int32) - 127
        np.ldexp(values, exponents[..., None, None], out=values)
        flat = values.reshape(*codes.shape[:-2], codes.shape[-2] * GROUP)
        start = inputs.start - groups.start * GROUP
        return flat[..., start : start + inputs.stop - inputs.start].swapaxes(-1, -2)
