"""Pictures of Llama 4: tiles, and the full picture as the last tile. An item is a tile.

transformers has this processor for torch only. Its rules are written here with numpy and Pillow:
pixels differ from it where Pillow rounds another way than torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media import picture
from rollout.media.processor import Kind, MediaError, Processor
from rollout.text.interface import Tokenizer

CLASS = "Llama4ImageProcessor"
_TOKENS = {
    "fake_image_token": "<|image|>",
    "image_token": "<|image|>",
    "start_of_image_token": "<|image_start|>",
    "end_of_image_token": "<|image_end|>",
    "patch_token": "<|patch|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}


@dataclass(frozen=True)
class Llama4(Processor):
    """Pictures as at most `most` tiles of `side` x `side` pixels, in patches of `patch` pixels and
    `count` rows.

    tokens: keys of processor_config.json to the tokens of the expansion.
    stretch: enlarge a picture up to its canvas; otherwise up to one tile at most.
    """

    kind: ClassVar[Kind] = "image"

    marker: str
    row_token: str
    reserved: tuple[str, ...]
    tokens: Mapping[str, str] = field(compare=False)
    side: int
    patch: int
    count: int
    most: int
    stretch: bool
    resample: int
    table: np.ndarray = field(repr=False, compare=False)

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns the square of patches, for each tile and the full picture."""
        high, wide = self._tiles(*size)
        tiles = high * wide
        patches = self.side // self.patch
        return ((patches, patches),) * (tiles + (tiles > 1))

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns how many rows a tile has: `count`, whatever its shape."""
        return self.count

    def text(self, size: tuple[int, int]) -> str:
        """Returns the rows of the tiles with separators, then those of the full picture, between
        start and end."""
        high, wide = self._tiles(*size)
        rows = self.row_token * self.count
        tokens = self.tokens
        line = (
            tokens["tile_x_separator_token"].join([rows] * wide) + tokens["tile_y_separator_token"]
        )
        tiles = line * high if high * wide > 1 else ""
        start = tokens["start_of_image_token"]
        end = tokens["end_of_image_token"]
        return f"{start}{tiles}{tokens['image_token']}{rows}{end}"

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns float32[patches, channel * y * x] of each tile, row by row of tiles, with the
        full picture last.

        The numbers are those of bfloat16, in which the reference computes.
        """
        height, width = content.shape[:2]
        high, wide = self._tiles(height, width)
        height, width = self._resized(height, width, high, wide)
        canvas = np.zeros((high * self.side, wide * self.side, 3), np.uint8)
        canvas[:height, :width] = picture.resize(content, height, width, self.resample)
        cut = (
            canvas.reshape(high, self.side, wide, self.side, 3)
            .swapaxes(1, 2)
            .reshape(-1, self.side, self.side, 3)
        )
        tiles = list(cut)
        if len(tiles) > 1:
            tiles.append(picture.resize(content, self.side, self.side, self.resample))
        return [
            picture.patches(picture.apply_levels(self.table, tile), self.patch) for tile in tiles
        ]

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Returns (rows, columns) of tiles: the canvas that needs the least enlargement, else the
        least reduction.

        Of canvases with the same scale the smallest is taken, of those the first in the order of
        the reference, which sorts them by ratio. Scales are compared in float32, as there.
        """
        canvases = _canvases(self.most)
        sides = np.array(canvases, np.float32) * np.float32(self.side)
        scales = (sides / np.array([height, width], np.float32)).min(axis=1)
        larger = scales[scales >= 1]
        if len(larger):
            scale = larger.max() if self.stretch else larger.min()
        else:
            scale = scales.max()
        return min(
            (c for c, s in zip(canvases, scales, strict=True) if s == scale),
            key=lambda c: c[0] * c[1],
        )

    def _resized(self, height: int, width: int, high: int, wide: int) -> tuple[int, int]:
        """Returns the sides of the picture on its canvas of `high` x `wide` tiles, at the ratio of
        the picture."""
        most_high, by_height = self._scale(height, high * self.side)
        most_wide, by_width = self._scale(width, wide * self.side)
        if np.float32(by_width) < np.float32(by_height):
            return max(min(_scaled(height, by_width), most_high), 1), most_wide
        return most_high, max(min(_scaled(width, by_height), most_wide), 1)

    def _scale(self, length: int, canvas: int) -> tuple[int, float | np.float32]:
        """Returns (the most pixels of a side, its scale). As in the reference, the scale is a
        float32 where the canvas bounds the side, and a float64 elsewhere."""
        requested = max(length, self.side)
        if self.stretch or requested > canvas:
            return canvas, np.float32(canvas) / np.float32(length)
        return requested, requested / length


def read(stored: DecodedKeys, processor: DecodedKeys, tokenizer: Tokenizer) -> Llama4:
    """Reads the processor from its stored keys. Raises MediaError for a form that is not supported.

    processor: the other keys of processor_config.json.
    """
    size = stored.get("size") or {"height": 336, "width": 336}
    if size["height"] != size["width"] or not stored.get("do_resize", True):
        raise MediaError(
            "tiles of Llama 4 are squares that pictures are resized to; do_resize: false is not "
            "supported"
        )
    tokens = {key: processor.get(key, default) for key, default in _TOKENS.items()}
    patch = processor.get("patch_size", 14)
    ratio = processor.get("pixel_shuffle_ratio", 0.5)
    if size["height"] % patch:
        raise MediaError(
            f"tiles of {size['height']} pixels are no multiple of the patches of {patch}"
        )
    return Llama4(
        marker=tokens["fake_image_token"],
        row_token=tokens["patch_token"],
        reserved=tuple(dict.fromkeys(tokens.values())),
        tokens=tokens,
        side=size["height"],
        patch=patch,
        count=(size["height"] // patch) ** 2 // round(1 / ratio**2),
        most=stored.get("max_patches", 16),
        stretch=stored.get("resize_to_max_canvas", False),
        resample=stored.get("resample", 2),
        table=_levels(stored),
    )


def _scaled(length: int, scale: float | np.float32) -> int:
    """Returns the pixels of a scaled side, rounded down. The product has the precision of the
    scale."""
    return math.floor(type(scale)(length) * scale)


def _canvases(most: int) -> list[tuple[int, int]]:
    """Lists (rows, columns) of up to `most` tiles, from many down. Canvases of one ratio follow the
    first of them."""
    ratios: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for high in range(1, tiles + 1):
            if tiles % high == 0:
                ratios.setdefault(high / (tiles // high), []).append((high, tiles // high))
    return [canvas for canvases in ratios.values() for canvas in canvases]


def _levels(stored: DecodedKeys) -> np.ndarray:
    """Returns float32[3, 256] as `picture.levels`, each step rounded to bfloat16 where both steps
    are asked for."""
    half = (0.5, 0.5, 0.5)
    if not (stored.get("do_rescale", True) and stored.get("do_normalize", True)):
        return picture.levels(stored, half, half)
    table = np.tile(np.arange(256, dtype=np.float32), (3, 1)) * np.float32(
        stored.get("rescale_factor", 1 / 255)
    )
    mean = _bfloat16(np.asarray(stored.get("image_mean") or half, np.float32)[:, None])
    std = _bfloat16(np.asarray(stored.get("image_std") or half, np.float32)[:, None])
    return _bfloat16(_bfloat16(_bfloat16(table) - mean) / std)


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Rounds finite float32 numbers to those of bfloat16, halves to even."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
