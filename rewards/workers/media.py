"""Pictures and sounds of rows of data as rewards get them: objects that open on use, and their way
to a worker process.

A worker gets the path of a file, or its bytes, never pixels that a run has decoded. A message holds
each content once, whatever the number of completions that show it. Imports the standard library
only, because every worker process imports this file when it starts.
"""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rewards import plugins

_NUMBER = "\0content"
"""Key of the objects of a message that stand for a content, with its number."""
_KEPT = 8
"""Decoded contents that a process keeps, because the completions of a group show the same ones."""
_MESSAGE = "\0message"
_CONTENTS = "\0contents"


@dataclass(frozen=True)
class Content:
    """A picture or a sound. Two are equal if content and size are.

    digest: sha256 of the bytes of the file, or of the array.
    size: (height, width) in pixels as displayed, or (samples of a channel, rate in Hz).
    source: path of a file, its bytes, or a numpy array.
    decoder: the function (kind, digest, size, source) -> array, as package.module:function.
    """

    kind: ClassVar[str]

    digest: str
    size: tuple[int, int]
    source: Any = field(compare=False, repr=False)
    decoder: str = field(compare=False, repr=False)

    def array(self) -> Any:
        """Returns what the model sees before its processor resizes it: a picture as uint8[H, W, 3],
        a sound as float32[samples] of one channel; read-only, because completions share it.

        Raises ValueError for a file that cannot be decoded or has changed.
        """
        return _decoded(self)


class Picture(Content):
    """A picture of a row of data."""

    kind = "image"

    def open(self) -> Any:
        """Returns the picture as a Pillow image: RGB, turned as displayed, opacity over white.
        Raises as `array`."""
        from PIL import Image

        return Image.fromarray(self.array())


class Sound(Content):
    """A sound of a row of data."""

    kind = "audio"

    @property
    def rate(self) -> int:
        """Returns the samples per second of `array`."""
        return self.size[1]


@functools.lru_cache(maxsize=_KEPT)
def _decoded(content: Content) -> Any:
    decode = plugins.load(content.decoder, "decoder")
    array = decode(content.kind, content.digest, content.size, content.source).view()
    array.flags.writeable = False
    return array


_KINDS: dict[str, type[Content]] = {kind.kind: kind for kind in (Picture, Sound)}


def dump(message: dict) -> str:
    """Returns a message as JSON, with the contents in it. Raises TypeError for values that neither
    JSON nor this file knows."""
    numbers: dict[Content, int] = {}

    def number(value: object) -> dict[str, int]:
        if not isinstance(value, Content):
            raise TypeError(f"{type(value).__name__} is no type of JSON")
        return {_NUMBER: numbers.setdefault(value, len(numbers))}

    text = json.dumps(message, default=number)
    if not numbers:
        return text
    return json.dumps({_MESSAGE: text, _CONTENTS: [_written(content) for content in numbers]})


def parse(text: bytes) -> dict:
    """Returns the message that `dump` wrote, with the contents of pictures and sounds in their
    places."""
    message = json.loads(text)
    if _CONTENTS not in message:
        return message
    contents = [_read(content) for content in message[_CONTENTS]]

    def content(value: dict) -> Any:
        return contents[value[_NUMBER]] if _NUMBER in value else value

    return json.loads(message[_MESSAGE], object_hook=content)


def _written(content: Content) -> dict[str, Any]:
    source: Any = content.source
    if isinstance(source, Path):
        form: dict[str, Any] = {"path": str(source.absolute())}
    elif isinstance(source, bytes):
        form = {"bytes": base64.b64encode(source).decode()}
    else:
        form = {
            "array": [source.dtype.str, source.shape, base64.b64encode(source.tobytes()).decode()]
        }
    return form | {
        "kind": content.kind,
        "digest": content.digest,
        "size": content.size,
        "decoder": content.decoder,
    }


def _read(form: dict[str, Any]) -> Content:
    if "path" in form:
        source: Any = Path(form["path"])
    elif "bytes" in form:
        source = base64.b64decode(form["bytes"])
    else:
        import numpy as np

        dtype, shape, data = form["array"]
        source = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
    return _KINDS[form["kind"]](form["digest"], tuple(form["size"]), source, form["decoder"])
