"""Pictures of Gemma 4: a grid of patches with a bounded area, pooled to rows.

Equal to `Gemma4ImageProcessor` of transformers in its Pillow form, to the last bit, without its
padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media import picture
from rollout.media.processor import Kind, MediaError, Processor, special
from rollout.text.interface import Tokenizer

CLASS = "Gemma4ImageProcessor"
_BOUNDS = (70, 140, 280, 560, 1120)  # rows of a picture that released models were trained with


@dataclass(frozen=True)
class Gemma4(Processor):
    """Pictures as grids of patches of `patch` pixels, `pool` x `pool` patches to a row and at most
    `most` rows."""

    kind: ClassVar[Kind] = "image"

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    begin: str
    end: str
    patch: int
    pool: int
    most: int
    resample: int
    table: np.ndarray = field(repr=False, compare=False)
    looks_ahead: bool = False

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns one shape, (height, width) in patches. Raises MediaError for a picture that is
        too long."""
        height, width = self._resized(*size)
        return ((height // self.patch, width // self.patch),)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns the number of pooled squares."""
        return shape[0] * shape[1] // self.pool**2

    def text(self, size: tuple[int, int]) -> str:
        """Returns the rows between their borders."""
        return f"{self.begin}{self.row_token * self.rows(self.shapes(size)[0])}{self.end}"

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns float32[patches, y * x * channel], row by row."""
        pixels = picture.resize(content, *self._resized(*content.shape[:2]), self.resample)
        return [
            picture.patches(
                picture.apply_levels(self.table, pixels), self.patch, channels_last=True
            )
        ]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the largest sides of about the same ratio that are multiples of a pooled square
        and fit the rows."""
        square = self.pool * self.patch
        area = self.most * square**2
        factor = math.sqrt(area / (height * width))
        high = math.floor(factor * height / square) * square
        wide = math.floor(factor * width / square) * square
        if high == 0:
            high = square
            wide = min(width // height, self.most) * square
        elif wide == 0:
            high = min(height // width, self.most) * square
            wide = square
        if high * wide > area or not high * wide:
            raise MediaError(f"a picture of {height}x{width} pixels does not fit {self.most} rows")
        return high, wide


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> Gemma4:
    """Reads the processor from its stored keys. Raises MediaError for a form that is not supported.

    processor: the other keys of processor_config.json, and `text_config` of config.json.
    """
    most = stored.get("max_soft_tokens", 280)
    if most not in _BOUNDS:
        raise MediaError(
            f"max_soft_tokens must be one of {', '.join(map(str, _BOUNDS))}, is {most}"
        )
    if not stored.get("do_resize", True):
        raise MediaError(
            "do_resize: false is not supported, because sides must be multiples of a pooled square"
        )
    marker = special(tokenizer, "image_token")
    begin = special(tokenizer, "boi_token")
    end = special(tokenizer, "eoi_token")
    return Gemma4(
        marker=marker,
        row_token=marker,
        reserved=(marker, begin, end),
        begin=begin,
        end=end,
        patch=stored.get("patch_size", 16),
        pool=stored.get("pooling_kernel_size", 3),
        most=most,
        resample=stored.get("resample", 3),
        table=picture.levels({"do_normalize": False, **stored}, (0.0,) * 3, (1.0,) * 3),
        looks_ahead=processor.get("text_config", {}).get("use_bidirectional_attention") == "vision",
    )
