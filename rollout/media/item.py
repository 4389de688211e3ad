"""What a tower reads, and what a processor of a family must offer.

Axes: N inputs of a tower (patches or frames), K numbers of an input, H and W sides of a picture in
pixels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from policy.media import Kind

if TYPE_CHECKING:
    import numpy as np

KINDS: tuple[Kind, ...] = ("image", "audio")
NOUNS: dict[str, str] = {"image": "picture", "audio": "sound"}
"""What messages call an item of a kind."""
Key = tuple[Kind, str]
"""(kind, digest) of an item or of a content."""


class MediaError(ValueError):
    """A picture or a sound that cannot be read, or that does not fit its prompt."""


def require(module: str, extra: str, need: str) -> ModuleType:
    """Imports an optional module. Raises MediaError that names the extra to install.

    need: what of the data needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MediaError(f"{need}; pip install 'duet-rl[{extra}]'") from None


@dataclass(frozen=True)
class Extent:
    """An item of a prompt before it is decoded: its place in a table follows from it.

    digest: sha256 of the content; of a tile also "-" and its number.
    shape: (height, width) in patches, or (frames, 1).
    rows: how many rows of the table it fills.
    """

    kind: Kind
    digest: str
    shape: tuple[int, int]
    rows: int

    @property
    def key(self) -> Key:
        """Returns (kind, digest), by which a table knows equal items."""
        return self.kind, self.digest

    @property
    def content(self) -> Key:
        """Returns (kind, digest) of the content, which its tiles share."""
        return self.kind, self.digest.partition("-")[0]

    @property
    def is_first(self) -> bool:
        """Whether the items of a content begin with this one."""
        return self.digest.partition("-")[2] in ("", "0")


@dataclass(frozen=True, eq=False)
class Item(Extent):
    """A picture, a tile of a picture, or a clip of sound, as its tower reads it.

    values: float32[N, K] in the order of the tower; N is the product of `shape`.
    """

    values: np.ndarray


class Processor:
    """Converts the pictures, or the sounds, of one family. A subclass is a frozen dataclass.

    marker: the text that a chat template writes for one picture or sound.
    row_token: the token that stands for one row after the expansion.
    reserved: texts that data may not contain, because the expansion writes them.
    sections: the rows of a picture have positions by height and width (Qwen); `merge` patches of a
    side become one row. looks_ahead: the tokens of a picture attend to each other.
    """

    kind: ClassVar[Kind]
    sections: ClassVar[bool] = False
    marker: str
    row_token: str
    reserved: tuple[str, ...]
    merge: int
    looks_ahead: bool = False

    def shapes(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Returns the shape of each item of a content of `size`: (height, width) in pixels, or
        (samples, rate in Hz).

        Raises MediaError for a size that the family cannot represent.
        """
        raise NotImplementedError

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns the number of rows that the tower makes of an item of `shape`."""
        raise NotImplementedError

    def text(self, size: tuple[int, int]) -> str:
        """Returns the text that replaces the marker of a content of `size`."""
        raise NotImplementedError

    def values(self, content: np.ndarray, rate: int) -> list[np.ndarray]:
        """Returns float32[N, K] of each item.

        content: uint8[H, W, 3], or float32[samples] at `rate` Hz (0 for pictures).
        """
        raise NotImplementedError

    def extents(self, digest: str, size: tuple[int, int]) -> tuple[Extent, ...]:
        """Returns the items of a content from its size alone. Raises MediaError as `shapes`."""
        shapes = self.shapes(size)
        return tuple(
            Extent(
                self.kind,
                digest if len(shapes) == 1 else f"{digest}-{number}",
                shape,
                self.rows(shape),
            )
            for number, shape in enumerate(shapes)
        )


def special(tokenizer: Any, name: str, default: str | None = None) -> str:
    """Returns the special token `name` of a tokenizer, such as `image_token`.

    default: the token of a tokenizer that names none.
    Raises MediaError if the tokenizer has no such token.
    """
    token = getattr(tokenizer, name, None) or default
    if token is None:
        raise MediaError(f"the tokenizer names no `{name}`; set it in tokenizer_config.json")
    return str(token)
