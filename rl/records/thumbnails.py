"""Writes a small copy of each picture of recorded samples, and reads it: `media/DIGEST.jpg` in the
folder of a run.

Tiny pictures, and all pictures without Pillow, are PNG files (`.png`). A file is written once, in
one step, and never removed: samples of other steps may show the same picture. H and W are the sides
of a picture in pixels, C its channels.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rl.records.messages import DIGEST
from rl.records.run_files import MEDIA

if TYPE_CHECKING:
    from rollout.media.reference import Reference

SIDE = 256
"""Longest side of a thumbnail in pixels. Smaller pictures keep their size."""
TINY = 64
"""Longest side of pictures that are kept exactly: JPEG blurs the few pixels that they have, and
saves nothing."""
MOST_BYTES = 1 << 20
"""Size of the largest file that is read: SIDE x SIDE pixels are 196,608 bytes before
compression."""
_JPEG = ".jpg"
_PNG = ".png"
_FORMATS = {_JPEG: ("image/jpeg", b"\xff\xd8\xff"), _PNG: ("image/png", b"\x89PNG\r\n\x1a\n")}


class Thumbnail(NamedTuple):
    """A file of the folder: name, content type, bytes."""

    name: str
    kind: str
    content: bytes


class Thumbnails:
    """Writes thumbnails in a thread of its own, so that the devices do not wait for the decoding of
    pictures.

    note: shows a line to the user. The first failure is noted; a failure never ends the run.
    """

    def __init__(self, directory: Path, note: Callable[[str], None]):
        self._folder = directory / MEDIA
        self._note = note
        self._known: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._failures: list[str] = []
        self._noted = False

    def write(self, references: Sequence[Reference]) -> None:
        """Starts writing the pictures among `references` that have no file yet. Sounds have
        none."""
        for reference in references:
            if reference.kind == "image" and reference.digest not in self._known:
                self._known.add(reference.digest)
                if find(self._folder.parent, reference.digest) is None:
                    self._pool = self._pool or ThreadPoolExecutor(1, "thumbnails")
                    self._waiting.append(self._pool.submit(self._try, reference))
        self._waiting = [each for each in self._waiting if not each.done()]
        self._show_failure()

    def wait(self) -> None:
        """Waits until every file is written, or has failed."""
        for each in self._waiting:
            each.result()
        self._waiting = []
        self._show_failure()

    def close(self) -> None:
        """Calls `wait` and ends the thread."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _try(self, reference: Reference) -> None:
        try:
            content, ending = encode(reference.decode())
            write(self._folder / f"{reference.digest}{ending}", content)
        # a full disk, a picture that changed, any error of a decoder: only a view lacks it
        except Exception as error:
            self._failures.append(str(error))

    def _show_failure(self) -> None:
        if self._failures and not self._noted:
            self._noted = True
            self._note(
                f"{self._folder}: a thumbnail cannot be written: {self._failures[0]}. The run "
                "goes on; samples show the size of such a picture only"
            )


def encode(pixels_HWC: np.ndarray) -> tuple[bytes, str]:
    """Returns (a file with a longest side of at most SIDE, its ending): JPEG by Pillow; PNG without
    it, or up to TINY.

    pixels_HWC: uint8[H, W, 3].
    """
    height, width = fit(*pixels_HWC.shape[:2])
    if max(pixels_HWC.shape[:2]) <= TINY:
        return png(pixels_HWC), _PNG
    try:
        from PIL import Image
    except ImportError:
        return png(reduced(pixels_HWC, height, width)), _PNG
    image = Image.fromarray(pixels_HWC)
    file = io.BytesIO()
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    image.save(file, "JPEG", quality=85)
    return file.getvalue(), _JPEG


def fit(height: int, width: int) -> tuple[int, int]:
    """Returns the sides of a thumbnail: the longest is at most SIDE, and none is 0."""
    scale = min(1.0, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def reduced(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns uint8[height, width, 3], the mean over blocks of nearly equal size; neither side may
    grow."""
    H, W = pixels_HWC.shape[:2]
    rows = np.arange(height) * H // height
    columns = np.arange(width) * W // width
    sums = np.add.reduceat(pixels_HWC.astype(np.uint32), rows, axis=0)
    sums = np.add.reduceat(sums, columns, axis=1)
    heights: np.ndarray = np.diff(np.append(rows, H))
    widths: np.ndarray = np.diff(np.append(columns, W))
    counts = heights[:, None, None] * widths[None, :, None]
    return ((sums + counts // 2) // counts).astype(np.uint8)


def png(pixels_HWC: np.ndarray) -> bytes:
    """Returns a PNG file of uint8[H, W, 3] (W3C PNG specification: colour type 2, no filter, one
    IDAT)."""
    height, width = pixels_HWC.shape[:2]
    lines = np.zeros(
        (height, 1 + 3 * width), np.uint8
    )  # the first byte of a line is its filter: 0, none
    lines[:, 1:] = pixels_HWC.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return _FORMATS[_PNG][1] + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def write(path: Path, content: bytes) -> None:
    """Writes a file in one step, so that a reader sees nothing or all of it. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def find(directory: Path, digest: str) -> Path | None:
    """Returns the thumbnail of a picture in the folder of a run; None: there is none, or `digest`
    is no digest."""
    if not DIGEST.fullmatch(digest):
        return None
    paths = (directory / MEDIA / f"{digest}{ending}" for ending in _FORMATS)
    return next((path for path in paths if path.is_file()), None)


def read(directory: Path, digest: str) -> Thumbnail | None:
    """Reads the thumbnail of a picture; None: there is none, or the file is no picture of the
    expected format."""
    path = find(directory, digest)
    if path is None:
        return None
    kind, beginning = _FORMATS[path.suffix]
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError:
        return None
    if len(content) > MOST_BYTES or not content.startswith(beginning):
        return None
    return Thumbnail(path.name, kind, content)
