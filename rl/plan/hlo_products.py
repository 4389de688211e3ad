"""Counts the floating-point operations of one HLO product: 2 for each multiplication, as XLA counts
them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rl.plan.hlo_text import Instruction, dims


def _dot(each: Instruction, operands: list[str]) -> float:
    left = dims(operands[0])
    result = dims(each.result)
    return (
        2.0
        * math.prod(result)
        * math.prod(left[i] for i in _numbers(each.rest, "lhs_contracting_dims"))
    )


def _ragged_dot(each: Instruction, operands: list[str]) -> float:
    """Counts each row with the weights of its own group only."""
    left = dims(operands[0])
    right = dims(operands[1])
    result = dims(each.result)
    summed = math.prod(left[i] for i in _numbers(each.rest, "lhs_contracting_dims"))
    if len(result) == len(right) and len(left) == len(right) - 1 and result[-1:] == right[-1:]:
        return 2.0 * math.prod(left) * right[-1]
    return 2.0 * math.prod(result) * summed


def _convolution(each: Instruction, operands: list[str]) -> float:
    """Counts pairs of an output and a window position that holds a number, not padding or a gap of
    a dilated input.

    A TPU computes matrix products as convolutions, and batched ones with a window over the batch.
    """
    left, right, result = (dims(text) for text in (*operands[:2], each.result))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
    if labels is None:
        raise ValueError(f"convolution {each.name} has no dim_labels")
    inputs, kernel, outputs = labels.groups()
    explicit = re.search(r"window=\{([^}]*)\}", each.rest)
    window = dict(re.findall(r"(\w+)=([\w-]+)", explicit[1] if explicit else ""))
    pairs = 1.0
    for axis in (letter for letter in kernel if letter.isdigit()):
        base = left[inputs.index(axis)]
        size = right[kernel.index(axis)]
        out = result[outputs.index(axis)]
        pairs *= _valid_pairs(
            base, size, out, {key: value.split("x")[int(axis)] for key, value in window.items()}
        )
    return (
        2.0
        * result[outputs.index("b")]
        * result[outputs.index("f")]
        * right[kernel.index("i")]
        * pairs
    )


def _valid_pairs(base: int, size: int, out: int, window: dict[str, str]) -> int:
    """Counts the pairs of one dimension. base, size, out: sizes of input, kernel and output along
    it."""
    stride = int(window.get("stride", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    dilated = int(window.get("lhs_dilate", 1))
    spread = int(window.get("rhs_dilate", 1))
    length = (base - 1) * dilated + 1
    count = 0
    for w in range(size):
        positions = (o * stride - low + w * spread for o in range(out))
        count += sum(1 for at in positions if 0 <= at < length and at % dilated == 0)
    return count


def _numbers(text: str, key: str) -> list[int]:
    match = re.search(rf"\b{key}=\{{([\d,]*)\}}", text)
    return [int(n) for n in match[1].split(",") if n] if match else []


# The kind of an instruction -> a function of (instruction, types of its operands) that returns its
# operations.
PRODUCTS: dict[str, Callable[[Instruction, list[str]], float]] = {
    "dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
}
