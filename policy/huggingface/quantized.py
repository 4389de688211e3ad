"""Quantised weights of Hugging Face files. Indexing a weight reads and dequantises that slice only.

`quantization_config` of config.json names the scheme: `fp8`, the block-scaled form of arXiv
2412.19437, section 3.3, in DeepSeek-V4's files with weights of 4-bit floats next to those of 8
bits; `mxfp4`, microscaling (OCP Microscaling Formats 1.0); or `compressed-tensors`, of which packed
4-bit integers are read.

O outputs and I inputs of a product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

# The 16 values of a 4-bit float with 2 exponent bits and 1 of mantissa (E2M1), by code.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
GROUP = 32  # values that share a scale in MXFP4
CODES_PER_WORD = 8  # 4-bit integers in an int32

Index = tuple[slice, ...]
View = Callable[[str], "np.ndarray | None"]


class QuantizationError(ValueError):
    """Raised for weights, or a description of them, that cannot be dequantised; the message names
    them."""


class Scheme(ABC):
    """The quantisation of the weights in a directory.

    The values of a weight lie in the tensor of its name with the ending `values`. `skip` holds
    patterns of tensors that are not weights.
    """

    values: ClassVar[str] = ""
    skip: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def find(self, name: str, view: View) -> Quantized | None:
        """Returns the tensor `name` if the file (`view`: array by name, None if absent) holds it
        quantised, else None."""


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """8-bit floats. `block` is the number of rows and columns per scale; None: one scale per
    tensor.

    The scales of `w.weight` are `w.weight_scale_inv`, or `w.scale` in DeepSeek-V4's files, where
    4-bit floats have scales of the latter name.
    """

    # The scales of quantised activations.
    skip: ClassVar[tuple[str, ...]] = (r".*\.activation_scale",)

    block: tuple[int, int] | None = None

    def find(self, name: str, view: View) -> Fp8 | Fp4 | None:
        values = view(name)
        if values is None or (kind := values.dtype.name) not in ("float8_e4m3fn", "int8"):
            return None
        other = f"{name.removesuffix('.weight')}.scale"
        scales = view(other) if name.endswith(".weight") else None
        if kind == "int8":
            return None if scales is None else Fp4(other, values, scales)
        if scales is not None:
            return Fp8(other, values, scales, self.block)
        inverse = f"{name}_scale_inv"
        return Fp8(inverse, values, _required(view, inverse), self.block)


@dataclass(frozen=True)
class Mxfp4Scheme(Scheme):
    """4-bit floats with a scale for each GROUP of them."""

    values: ClassVar[str] = "_blocks"

    def find(self, name: str, view: View) -> Mxfp4 | None:
        blocks = view(name + self.values)
        return None if blocks is None else Mxfp4(name, blocks, _required(view, f"{name}_scales"))


@dataclass(frozen=True)
class Int4Scheme(Scheme):
    """4-bit integers with a scale for each `group` of columns."""

    values: ClassVar[str] = "_packed"

    group: int

    def find(self, name: str, view: View) -> Int4 | None:
        words = view(name + self.values)
        if words is None:
            return None
        return Int4(
            name,
            words,
            _required(view, f"{name}_scale"),
            _required(view, f"{name}_shape"),
            self.group,
        )


def scheme(config: dict | None) -> Scheme | None:
    """Returns the scheme of a `quantization_config`, None without one. Raises QuantizationError if
    it is not supported."""
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "bitsandbytes":
        raise QuantizationError(
            "files of bitsandbytes are not read: give the unquantised directory, and "
            "base_weights: nf4"
        )
    if method not in METHODS:
        *others, last = METHODS
        known = f"{', '.join(others)} and {last}"
        raise QuantizationError(
            f"quant_method {method!r} is not supported, only {known}; dequantise the weights first"
        )
    return METHODS[method](config)


def _fp8(config: dict) -> Fp8Scheme:
    block = config.get("weight_block_size", [128, 128])
    if block is None:
        return Fp8Scheme()
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise QuantizationError(
            f"weight_block_size {block!r}: expected two positive numbers, rows and columns"
        )
    return Fp8Scheme(tuple(block))


def _packed_int4(config: dict) -> Int4Scheme:
    """Reads a configuration of compressed-tensors: one group of layers with packed symmetric 4-bit
    integers. Layers under `ignore` are not packed, which the files show."""
    _expect(config, "format", ("pack-quantized",))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise QuantizationError(
                f"{key} {config[key]!r} is not supported; dequantise the weights first"
            )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise QuantizationError(
            f"config_groups {groups!r}: expected one group, the other layers under ignore"
        )
    [(name, group)] = groups.items()
    where = f"config_groups.{name}."
    if not isinstance(group, dict):
        raise QuantizationError(
            f"config_groups.{name} {group!r}: expected the description of a group of layers"
        )
    for key in ("input_activations", "output_activations"):
        _expect(group, key, (None,), where)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise QuantizationError(
            f"{where}weights {weights!r}: expected the description of quantised weights"
        )
    where += "weights."
    _expect(weights, "num_bits", (4,), where)
    _expect(weights, "type", ("int",), where)
    _expect(weights, "symmetric", (True,), where)
    _expect(weights, "strategy", ("group",), where)
    _expect(weights, "actorder", (None, False), where)
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 1:
        raise QuantizationError(
            f"{where}group_size {size!r}: expected a positive number of columns"
        )
    return Int4Scheme(size)


def _expect(section: dict, key: str, known: tuple, where: str = "") -> None:
    if (value := section.get(key)) not in known:
        raise QuantizationError(f"{where}{key} {value!r} is not supported, only {known[0]!r}")


METHODS: dict[str, Callable[[dict], Scheme]] = {
    "fp8": _fp8,
    "mxfp4": lambda config: Mxfp4Scheme(),
    "compressed-tensors": _packed_int4,
}


def _required(view: View, name: str) -> np.ndarray:
    array = view(name)
    if array is None:
        raise QuantizationError(f"missing tensor {name}, which belongs to quantised weights")
    return array


class Fp8:
    """A tensor float32[..., O, I]: 8-bit values times the scale of their block; the last blocks may
    be smaller. `name` is that of the scales."""

    def __init__(
        self, name: str, values: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None
    ):
        self.shape, stored = values.shape, f"{name} has shape {list(scales.shape)}"
        if block is None:
            if scales.size != 1:
                raise QuantizationError(f"{stored}, but without weight_block_size it is one number")
            block = values.shape[-2:]
            scales = scales.reshape((1,) * len(self.shape))
        expected = (
            *self.shape[:-2],
            *(-(-n // b) for n, b in zip(self.shape[-2:], block, strict=True)),
        )
        if scales.shape != expected:
            raise QuantizationError(
                f"{stored}, expected {list(expected)}: one for each block of {block[0]} rows and "
                f"{block[1]} columns"
            )
        self._values = values
        self._scales = scales
        self._block = block

    def __getitem__(self, index: Index) -> np.ndarray:
        *leading, rows, columns = (
            slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)
        )
        out = self._values[(*leading, rows, columns)].astype(np.float32)
        height, width = self._block
        block_of_column = np.arange(columns.start, columns.stop) // width
        for row in range(rows.start // height, -(-rows.stop // height)):
            scales = self._scales[(*leading, row)].astype(np.float32)[..., block_of_column]
            low = max(row * height, rows.start) - rows.start
            high = min((row + 1) * height, rows.stop) - rows.start
            out[..., low:high, :] *= scales[..., None, :]
        return out


class Fp4:
    """A tensor float32[O, I]: 4-bit floats times the scale of their GROUP of columns. `values`
    int8[O, I/2] has two of them in a byte, the first in the low half; `scales` is a float [O,
    I/GROUP], and `name` is its name."""

    def __init__(self, name: str, values: np.ndarray, scales: np.ndarray):
        rows = values.shape[0]
        columns = 2 * values.shape[-1]
        expected = (rows, math.ceil(columns / GROUP))
        if values.ndim != 2 or scales.shape != expected:
            raise QuantizationError(
                f"{name} has shape {list(scales.shape)}, expected {list(expected)}: one for each "
                f"{GROUP} columns of a row of 4-bit floats int8{list(values.shape)}"
            )
        self.shape = (rows, columns)
        self._values = values.view(np.uint8)
        self._scales = scales

    def __getitem__(self, index: Index) -> np.ndarray:
        rows, columns = (slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True))
        first = columns.start // 2
        last = math.ceil(columns.stop / 2)
        codes = self._values[rows, first:last]
        pairs = np.stack([FP4[codes & 15], FP4[codes >> 4]], axis=-1)
        start = columns.start - 2 * first
        values = pairs.reshape(len(codes), 2 * codes.shape[1])[
            :, start : start + columns.stop - columns.start
        ]
        group_of_column = np.arange(columns.start, columns.stop) // GROUP
        return values * self._scales[rows].astype(np.float32)[:, group_of_column]


class Mxfp4:
    """A tensor float32[..., I, O]: 4-bit floats times 2^(s - 127), one s for 32 values along I. It
    is stored transposed, as `blocks` uint8[..., O, I/32, 16] (two values in a byte, the low half
    first) and `scales` uint8[..., O, I/32]."""

    def __init__(self, name: str, blocks: np.ndarray, scales: np.ndarray):
        *leading, outputs, groups, width = blocks.shape if blocks.ndim > 2 else (0, 0, 0)
        if (
            width != GROUP // 2
            or scales.shape != blocks.shape[:-1]
            or {blocks.dtype.name, scales.dtype.name} != {"uint8"}
        ):
            stored = (
                f"_blocks {blocks.dtype.name}{list(blocks.shape)} and _scales "
                f"{scales.dtype.name}{list(scales.shape)}"
            )
            raise QuantizationError(
                f"{name}: {stored} must be uint8[..., outputs, inputs / {GROUP}, {GROUP // 2}]"
                " and uint8 without the last axis"
            )
        self.shape = (*leading, groups * GROUP, outputs)
        self._blocks = blocks
        self._scales = scales

    def __getitem__(self, index: Index) -> np.ndarray:
        *leading, inputs, outputs = (
            slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)
        )
        groups = slice(inputs.start // GROUP, math.ceil(inputs.stop / GROUP))
        codes = self._blocks[(*leading, outputs, groups)]
        values = np.empty((*codes.shape, 2), np.float32)
        values[..., 0], values[..., 1] = FP4[codes & 15], FP4[codes >> 4]
        exponents = self._scales[(*leading, outputs, groups)].astype(np.int32) - 127
        np.ldexp(values, exponents[..., None, None], out=values)
        flat = values.reshape(*codes.shape[:-2], codes.shape[-2] * GROUP)
        start = inputs.start - groups.start * GROUP
        return flat[..., start : start + inputs.stop - inputs.start].swapaxes(-1, -2)


class Int4:
    """A tensor float32[O, I]: 4-bit integers from -8 to 7 times the scale of their `group` of
    columns.

    `words` int32[O, I/8] has 8 integers in a word, the first in the lowest bits, each plus 8.
    `scales` is a float [O, I/group], `shape` is (O, I): the last word and the last group of a row
    may be incomplete.
    """

    def __init__(
        self, name: str, words: np.ndarray, scales: np.ndarray, shape: np.ndarray, group: int
    ):
        if shape.size != 2:
            raise QuantizationError(
                f"{name}_shape has {shape.size} numbers, expected 2: rows and columns"
            )
        rows, columns = (int(n) for n in shape.reshape(-1))
        expected = (rows, math.ceil(columns / CODES_PER_WORD))
        if words.dtype.name != "int32" or words.shape != expected:
            stored = f"{words.dtype.name}{list(words.shape)}"
            raise QuantizationError(
                f"{name}_packed is {stored}, expected int32{list(expected)}: 8 integers in a word"
            )
        expected = (rows, math.ceil(columns / group))
        if scales.shape != expected:
            raise QuantizationError(
                f"{name}_scale has shape {list(scales.shape)}, expected {list(expected)}: "
                f"one for each {group} columns of a row"
            )
        self.shape = (rows, columns)
        self._words = words.view(np.uint32)
        self._scales = scales
        self._group = group

    def __getitem__(self, index: Index) -> np.ndarray:
        rows, columns = (slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True))
        first = columns.start // CODES_PER_WORD
        last = math.ceil(columns.stop / CODES_PER_WORD)
        words = self._words[rows, first:last]
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        codes = words[..., None] >> shifts & np.uint32(15)
        values = codes.reshape(len(words), CODES_PER_WORD * words.shape[1]).astype(np.float32) - 8
        start = columns.start - first * CODES_PER_WORD
        values = values[:, start : start + columns.stop - columns.start]
        group_of_column = np.arange(columns.start, columns.stop) // self._group
        return values * self._scales[rows].astype(np.float32)[:, group_of_column]


Quantized = Fp8 | Fp4 | Mxfp4 | Int4
"""A weight of a file: `shape`, and float32 slices of it by index."""
