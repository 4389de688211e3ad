"""Pictures of Qwen3-VL, Qwen3.5 and Qwen3-Omni: any grid of patches, merged in blocks to rows.

Equal to `Qwen2VLImageProcessor` of transformers in its Pillow form, to the last bit. Pillow is
needed to resize only.
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

CLASS = "Qwen2VLImageProcessor"
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_LONGEST = 200  # times the shorter side, which transformers accepts


@dataclass(frozen=True)
class Qwen(Processor):
    """Pictures as grids of patches of `patch` pixels, `merge` x `merge` patches to a row.

    frames: how often a still picture is repeated in a patch.
    least, most: pixels of a picture after resizing.
    """

    kind: ClassVar[Kind] = "image"
    sections: ClassVar[bool] = True

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    resample: int
    table: np.ndarray = field(repr=False, compare=False)

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns one shape, (height, width) in patches.

        Raises MediaError for a side that is over 200 times longer than the other.
        """
        height, width = self._resized(*size)
        return ((height // self.patch, width // self.patch),)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns the number of merged blocks."""
        return shape[0] * shape[1] // self.merge**2

    def text(self, size: tuple[int, int]) -> str:
        """Returns the row token, once for each row."""
        return self.row_token * self.rows(self.shapes(size)[0])

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns float32[patches, channel * frame * y * x] in the order of the blocks: block
        row, block column, row and column in the block."""
        height, width = self._resized(*content.shape[:2])
        pixels = picture.apply_levels(
            self.table, picture.resize(content, height, width, self.resample)
        )
        merge = self.merge
        patch = self.patch
        blocks_high = height // patch // merge
        blocks_wide = width // patch // merge
        cut = pixels.reshape(3, blocks_high, merge, patch, blocks_wide, merge, patch).transpose(
            1, 4, 2, 5, 0, 3, 6
        )
        repeated = np.repeat(cut[:, :, :, :, :, None], self.frames, axis=5)
        return [repeated.reshape(height * width // patch**2, -1)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the sides after resizing: multiples of a block, with `least` to `most` pixels in
        all."""
        if max(height, width) > _LONGEST * min(height, width):
            raise MediaError(
                f"a picture of {height}x{width} pixels is too long: at most {_LONGEST} times its "
                "other side"
            )
        block = self.patch * self.merge
        high = round(height / block) * block
        wide = round(width / block) * block
        if high * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            high = max(block, math.floor(height / shrink / block) * block)
            wide = max(block, math.floor(width / shrink / block) * block)
        elif high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            high = math.ceil(height * grow / block) * block
            wide = math.ceil(width * grow / block) * block
        return high, wide


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> Qwen:
    """Reads the processor from its stored keys. Raises MediaError for a form that is not supported.

    processor: the other keys of processor_config.json.
    """
    if not stored.get("do_resize", True):
        raise MediaError(
            "do_resize: false is not supported, because sides must be multiples of a merged block"
        )
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | dict(
        stored.get("size") or {}
    )
    pad = special(tokenizer, "image_token", "<|image_pad|>")
    start = special(
        tokenizer,
        "vision_start_token",
        getattr(tokenizer, "vision_bos_token", None) or "<|vision_start|>",
    )
    end = special(
        tokenizer,
        "vision_end_token",
        getattr(tokenizer, "vision_eos_token", None) or "<|vision_end|>",
    )
    return Qwen(
        marker=pad,
        row_token=pad,
        reserved=(pad, start, end),
        patch=stored.get("patch_size", 14),
        merge=stored.get("merge_size", 2),
        frames=stored.get("temporal_patch_size", 2),
        least=stored.get("min_pixels") or size["shortest_edge"],
        most=stored.get("max_pixels") or size["longest_edge"],
        resample=stored.get("resample", 3),
        table=picture.levels(stored, _CLIP_MEAN, _CLIP_STD),
    )
