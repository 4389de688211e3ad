"""References to pictures and sounds in rows of data: where the content lies, its digest and its
size.

A reference to a file holds its path. The content is read once for digest and size, and again when a
tower needs it.

Axes: N inputs of a tower, K numbers of an input, H and W sides of a picture in pixels.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from policy.media import Item
from rollout.media import picture, sound
from rollout.media.processor import NOUNS, Kind, MediaError, Processor

_PLACES = ("path", "image", "image_url", "audio", "audio_url", "input_audio", "url", "data")


@dataclass(frozen=True)
class Reference:
    """A picture or a sound of a row. Two are equal if kind, content and size are.

    digest: sha256 of the bytes of the file, or of an array.
    size: (height, width) in pixels as displayed, or (samples of a channel, rate in Hz).
    source: path of a file, its bytes, uint8[H, W, 3], or float32[samples].
    where: place for messages, e.g. file:line and the number of the picture.
    """

    kind: Kind
    digest: str
    size: tuple[int, int]
    source: Path | bytes | np.ndarray = field(compare=False, repr=False)
    where: str = field(default="", compare=False)

    def decode(self) -> np.ndarray:
        """Returns uint8[H, W, 3], or float32[samples] at the rate of `size`.

        Raises MediaError for a file that cannot be decoded or has changed since the reference was
        made.
        """
        try:
            if isinstance(self.source, np.ndarray):
                return self.source
            content = _content(self.source)
            if hashlib.sha256(content).hexdigest() != self.digest:
                raise MediaError(f"{self.source} has changed since the run read it")
            with _naming(self.source):
                return picture.decode(content) if self.kind == "image" else sound.decode(content)[0]
        except MediaError as error:
            raise MediaError(f"{self.where}: {error}" if self.where else str(error)) from None

    def inputs(self, processor: Processor) -> dict[Item, np.ndarray]:
        """Decodes the content and returns what the tower reads: float32[N, K] of each item, N
        inputs of K numbers. Raises MediaError as `decode`."""
        rate = self.size[1] if self.kind == "audio" else 0
        values = processor.values(self.decode(), rate)
        return dict(zip(processor.items(self.digest, self.size), values, strict=True))


def decode(
    kind: Kind, digest: str, size: tuple[int, int], source: Path | bytes | np.ndarray
) -> np.ndarray:
    """Decodes a content as `Reference.decode`, for rewards (rewards/workers/media.py)."""
    return Reference(kind, digest, size, source).decode()


def refer(kind: Kind, value: object, base: Path, where: str = "") -> Reference:
    """Makes a reference from a value of a row.

    value: a path, bytes, a data URI, an array uint8[H, W, 3], a Pillow image, or a mapping that
    holds one of them, such
        as {bytes, path}, {url} or {array, sampling_rate}.
    base: folder that relative paths start from.
    where: place for the messages of later errors.

    Raises MediaError for an address of the network, a file that does not exist, a content that
    cannot be read, and a picture that `picture.check_complete` refuses.
    """
    source, rate = _source(kind, value, base)
    if isinstance(source, np.ndarray):
        head = f"{source.dtype}{source.shape}{rate}".encode()
        digest = hashlib.sha256(head + np.ascontiguousarray(source).tobytes()).hexdigest()
        size = (len(source), rate) if kind == "audio" else (source.shape[0], source.shape[1])
    else:
        content = _content(source)
        digest = hashlib.sha256(content).hexdigest()
        with _naming(source):
            size = _checked_size(kind, content)
    return Reference(kind, digest, size, source, where)


@contextlib.contextmanager
def _naming(source: Path | bytes) -> Iterator[None]:
    """Puts the name of a file before the message of a MediaError."""
    try:
        yield
    except MediaError as error:
        raise MediaError(f"{source}: {error}" if isinstance(source, Path) else str(error)) from None


def _checked_size(kind: Kind, content: bytes) -> tuple[int, int]:
    if kind == "audio":
        return sound.size(content)
    result = picture.size(content)
    picture.check_complete(content)
    return result


def _content(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise MediaError(f"{source} cannot be read: {error.strerror}") from None


def _source(kind: Kind, value: Any, base: Path) -> tuple[Path | bytes | np.ndarray, int]:
    """Returns (source, sampling rate of an array or 0)."""
    if isinstance(value, Mapping):
        return _of_mapping(kind, value, base)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), 0
    if isinstance(value, Path):
        return base / value, 0
    if isinstance(value, str):
        return _of_text(kind, value, base), 0
    if kind == "image" and isinstance(value, np.ndarray):
        return picture.from_array(value), 0
    if kind == "image" and type(value).__module__.startswith("PIL."):
        return picture.from_pillow(value), 0
    raise MediaError(
        f"a {NOUNS[kind]} must be a path, bytes or a data URI, is {type(value).__name__}"
    )


def _of_mapping(
    kind: Kind, value: Mapping[str, Any], base: Path
) -> tuple[Path | bytes | np.ndarray, int]:
    if value.get("bytes") is not None:
        return bytes(value["bytes"]), 0
    if kind == "audio" and value.get("array") is not None:
        if not isinstance(rate := value.get("sampling_rate"), int) or rate <= 0:
            raise MediaError("an array of a sound needs its `sampling_rate` in Hz")
        return sound.from_array(np.asarray(value["array"])), rate
    if kind == "audio" and "format" in value and isinstance(text := value.get("data"), str):
        return _base64(text.partition(",")[2] if text.startswith("data:") else text), 0
    for key in _PLACES:
        if value.get(key) is not None:
            return _source(kind, value[key], base)
    raise MediaError(
        f"a {NOUNS[kind]} without content: it needs `bytes`, `path` or `url`, has "
        f"{', '.join(value)}"
    )


def _of_text(kind: Kind, text: str, base: Path) -> Path | bytes:
    scheme = text[: text.find(":")].lower() if ":" in text[:12] else ""
    if scheme == "data":
        head, comma, body = text.partition(",")
        if not comma:
            raise MediaError(
                "a data URI has the form data:image/png;base64,..., this one begins with "
                f"{head[:40]!r}"
            )
        return _base64(body) if head.endswith(";base64") else unquote_to_bytes(body)
    if scheme in ("http", "https", "ftp", "s3", "gs"):
        raise MediaError(
            f"{text[:100]} is an address of the network; download the {NOUNS[kind]} and give its "
            "path"
        )
    path = base / (unquote(text[len("file://") :]) if scheme == "file" else text)
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # no name of a file: too long, or with a zero byte
        exists = False
    if not exists:
        raise MediaError(
            f"no such file: {str(path)[:300]} (relative paths start from {base.absolute()})"
        )
    return path


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"not valid base64: {error}") from None
