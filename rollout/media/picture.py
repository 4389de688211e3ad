"""Pictures: the size from the header, pixels in RGB, and the steps that processors share.

Axes: H and W sides in pixels, C channels (RGB), P side of a patch, N patches.
"""

from __future__ import annotations

import io
import zlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.json_types import DecodedKeys
from rollout.media.processor import MediaError, require

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 89_478_485
"""Pixels of the largest picture that is opened: from there on Pillow warns of decompression
bombs."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read, in the words of Pillow. Others of Pillow start programs (EPS) or open
further files."""
_CHANNELS = (0, 3, 4)  # of arrays: grey without an axis of channels, RGB, RGB with opacity
_TURNED = (5, 6, 7, 8)  # values of the EXIF orientation that swap the sides
_PNG_BEGIN = b"\x89PNG\r\n\x1a\n"
_JPEG_END = b"\xff\xd9"
# Tags of EXIF and TIFF.
_ORIENTATION = 0x0112
_WIDTH = 0x0100
_HEIGHT = 0x0101


def size(content: bytes) -> tuple[int, int]:
    """Returns (height, width) as displayed, from the header alone.

    Raises MediaError for a file that is no picture, or has more than MAX_PIXELS.
    """
    image = _open(content)
    # Pillow turns TIFF files by itself, and depending on its version their size says so already.
    width, height = (
        (image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]) if image.format == "TIFF" else image.size
    )
    return (width, height) if _orientation(image) in _TURNED else (height, width)


def check_complete(content: bytes) -> None:
    """Raises MediaError for a picture whose file was cut off or overwritten with zeros, and cannot
    be decoded.

    Only files that look so are decoded: PNG with a wrong checksum, JPEG without its end, and any
    file of a format other than PNG, JPEG and WebP. Damage in the middle of a JPEG or WebP file
    stays unseen.
    """
    image = _open(content)
    if not _looks_complete(image, content):
        from_pillow(image)


def decode(content: bytes) -> np.ndarray:
    """Decodes a picture to uint8[H, W, 3]: turned as its EXIF orientation says, RGB, opacity over
    white.

    The first frame of an animation and the first page of a file with several are read.
    Raises MediaError for a file that cannot be decoded.
    """
    return from_pillow(_open(content))


def from_pillow(image: Image.Image) -> np.ndarray:
    """Converts a Pillow image to uint8[H, W, 3] as `decode`. Raises MediaError if its pixels cannot
    be read."""
    modules = require("PIL.Image", "vision", "pictures need Pillow")
    try:
        # Before the pixels are read: PNG files may have another orientation after them, which
        # `size` does not see.
        turn = None if image.format == "TIFF" else _transposition(modules, _orientation(image))
        image.load()
        return _rgb(modules, image if turn is None else image.transpose(turn))
    except MediaError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error, ...
        raise MediaError(f"broken picture ({image.format or image.mode}): {error}") from None


def from_array(pixels: np.ndarray) -> np.ndarray:
    """Converts uint8[H, W], [H, W, 3] or [H, W, 4] to uint8[H, W, 3], opacity over white. Raises
    MediaError."""
    channels = pixels.shape[2] if pixels.ndim == 3 else 0
    if (
        pixels.dtype != np.uint8
        or pixels.ndim not in (2, 3)
        or channels not in _CHANNELS
        or not pixels.size
    ):
        raise MediaError(
            "an array of a picture must be uint8 of shape [height, width, 3], is "
            f"{pixels.dtype}{list(pixels.shape)}"
        )
    _check_pixels(*pixels.shape[:2])
    if channels == 0:
        return np.repeat(pixels[:, :, None], 3, axis=2)
    if channels == 3:
        return pixels
    opacity = pixels[..., 3:].astype(np.int32)
    return ((pixels[..., :3] * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def resize(pixels_HWC: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Returns uint8[height, width, C] by a filter of Pillow (2 bilinear, 3 bicubic); unchanged if
    it has the size."""
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    pillow = require("PIL.Image", "vision", f"resizing a picture to {height}x{width} needs Pillow")
    return np.asarray(pillow.fromarray(pixels_HWC).resize((width, height), resample=resample))


def levels(stored: DecodedKeys, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Returns float32[C, 256]: the value of each grey level after `do_rescale` and `do_normalize`
    of a processor.

    stored: its keys, of which absent ones default to 1/255, `mean` and `std`.
    The arithmetic is that of transformers: float64 for the scale, float32 for mean and deviation.
    """
    table = np.tile(np.arange(256, dtype=np.float64), (3, 1))
    if stored.get("do_rescale", True):
        table = table * stored.get("rescale_factor", 1 / 255)
    table = table.astype(np.float32)
    if stored.get("do_normalize", True):
        mean32 = np.asarray(stored.get("image_mean") or mean, np.float32)[:, None]
        table = (table - mean32) / np.asarray(stored.get("image_std") or std, np.float32)[:, None]
    return table


def apply_levels(table_C256: np.ndarray, pixels_HWC: np.ndarray) -> np.ndarray:
    """Returns float32[C, H, W]: each pixel replaced by its entry of the table of its channel."""
    return np.stack([table[pixels_HWC[..., channel]] for channel, table in enumerate(table_C256)])


def patches(values_CHW: np.ndarray, patch: int, channels_last: bool = False) -> np.ndarray:
    """Cuts a picture into patches, row by row: float32[N, C*P*P], each flattened as (channel, y,
    x).

    channels_last: flatten as (y, x, channel).
    """
    channels, height, width = values_CHW.shape
    cut = values_CHW.reshape(channels, height // patch, patch, width // patch, patch)
    order = (1, 3, 2, 4, 0) if channels_last else (1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut.transpose(order)).reshape(-1, channels * patch * patch)


def _open(content: bytes) -> Any:
    pillow = require("PIL.Image", "vision", "pictures in files need Pillow")
    try:
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise MediaError(f"the picture has more than {MAX_PIXELS} pixels; scale it down") from None
    except Exception:  # of the header: OSError, SyntaxError, struct.error, ...
        begin = content[:8].hex(" ") or "nothing"
        raise MediaError(
            f"not a picture that Pillow reads ({len(content)} bytes, beginning with {begin}); "
            f"the formats are {', '.join(FORMATS)}"
        ) from None
    _check_pixels(*image.size)
    return image


def _looks_complete(image: Image.Image, content: bytes) -> bool:
    match image.format:
        case "JPEG" | "MPO":
            return content.endswith(_JPEG_END)
        case "WEBP":  # `_open` has refused a file that is shorter than its header says
            return True
        case "PNG":
            return _has_checksums(content)
        case _:
            return False


def _has_checksums(content: bytes) -> bool:
    """Whether each chunk of a PNG file has its checksum, up to the last one."""
    view = memoryview(content)
    place = len(_PNG_BEGIN)
    while place + 12 <= len(content):
        length = int.from_bytes(view[place : place + 4], "big")
        end = place + 8 + length
        if zlib.crc32(view[place + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            return False
        if view[place + 4 : place + 8] == b"IEND":
            return True
        place = end + 4
    return False


def _check_pixels(one: int, other: int) -> None:
    if one * other > MAX_PIXELS:
        raise MediaError(
            f"the picture has {one * other} pixels, more than {MAX_PIXELS}; scale it down"
        )


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, 1 to 8. Reads no pixels: Pillow's own method for PNG files
    would decode them."""
    pillow = require("PIL.Image", "vision", "pictures need Pillow")
    try:
        number = pillow.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not make a picture unreadable
        return 1
    return number if number in range(1, 9) else 1


def _transposition(pillow: ModuleType, orientation: int) -> Any:
    names = pillow.Transpose
    return {
        2: names.FLIP_LEFT_RIGHT,
        3: names.ROTATE_180,
        4: names.FLIP_TOP_BOTTOM,
        5: names.TRANSPOSE,
        6: names.ROTATE_270,
        7: names.TRANSVERSE,
        8: names.ROTATE_90,
    }.get(orientation)


def _rgb(pillow: ModuleType, image: Image.Image) -> np.ndarray:
    if image.mode in ("I", "F"):
        raise MediaError(
            "32-bit grey levels have no known range; save the picture with 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):  # Pillow would cut every level above 255
        deep = np.asarray(image).astype(np.int64)
        return from_array(((deep + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", over.size, "white"), over)
    return np.asarray(image.convert("RGB"))
