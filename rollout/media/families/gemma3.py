"""Pictures of Gemma 3: one square, always the same number of rows.

Equal to `Gemma3ImageProcessor` of transformers in its Pillow form, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media import picture
from rollout.media.processor import Kind, MediaError, Processor, special
from rollout.text.interface import Tokenizer

CLASS = "Gemma3ImageProcessor"
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Gemma3(Processor):
    """Pictures resized to `side` x `side` pixels, in patches of `patch` pixels and `count` rows."""

    kind: ClassVar[Kind] = "image"

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    end: str
    side: int
    patch: int
    count: int
    resample: int
    table: np.ndarray = field(repr=False, compare=False)
    looks_ahead: bool = True

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns the square of patches, for every size."""
        return ((self.side // self.patch, self.side // self.patch),)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns how many rows a picture has: `count`, whatever its shape."""
        return self.count

    def text(self, size: tuple[int, int]) -> str:
        """Returns the rows between their borders and blank lines. The line breaks merge with those
        of the text."""
        return f"\n\n{self.marker}{self.row_token * self.count}{self.end}\n\n"

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns float32[patches, channel * y * x], row by row."""
        pixels = picture.resize(content, self.side, self.side, self.resample)
        return [picture.patches(picture.apply_levels(self.table, pixels), self.patch)]


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> Gemma3:
    """Reads the processor from its stored keys. Raises MediaError for a form that is not supported.

    processor: the other keys of processor_config.json, and `vision_config` of config.json.
    """
    if stored.get("do_pan_and_scan"):
        raise MediaError(
            "do_pan_and_scan: true is not supported; set it to false in the processor's "
            "configuration"
        )
    size = stored.get("size") or {"height": 224, "width": 224}
    if size["height"] != size["width"]:
        raise MediaError(
            f"pictures of Gemma 3 are squares, the processor says {size['height']}x{size['width']}"
        )
    patch = processor.get("vision_config", {}).get("patch_size", 14)
    if size["height"] % patch:
        raise MediaError(
            f"pictures of {size['height']} pixels are no multiple of the patches of {patch}"
        )
    boi = special(tokenizer, "boi_token")
    row = special(tokenizer, "image_token")
    end = special(tokenizer, "eoi_token")
    return Gemma3(
        marker=boi,
        row_token=row,
        reserved=(boi, row, end),
        end=end,
        side=size["height"],
        patch=patch,
        count=processor.get("image_seq_length", 256),
        resample=stored.get("resample", 2),
        table=picture.levels(stored, _HALF, _HALF),
    )
