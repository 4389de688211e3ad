"""What a processor of a family must offer, and its errors.

Axes: N inputs of a tower (patches or frames), K numbers of an input, H and W sides of a picture in
pixels.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from policy.media import Item, Kind
from rollout.text.interface import Tokenizer

if TYPE_CHECKING:
    import numpy as np

KINDS: tuple[Kind, ...] = ("image", "audio")
NOUNS: dict[str, str] = {"image": "picture", "audio": "sound"}
"""What messages call a content of a kind."""


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

    def items(self, digest: str, size: tuple[int, int]) -> tuple[Item, ...]:
        """Returns the items of a content from its size alone. Raises MediaError as `shapes`."""
        shapes = self.shapes(size)
        return tuple(
            Item(
                self.kind,
                digest if len(shapes) == 1 else f"{digest}-{number}",
                shape,
                self.rows(shape),
            )
            for number, shape in enumerate(shapes)
        )


def special(tokenizer: Tokenizer, name: str, default: str | None = None) -> str:
    """Returns the special token `name` of a tokenizer, such as `image_token`.

    default: the token of a tokenizer that names none.
    Raises MediaError if the tokenizer has no such token.
    """
    token = getattr(tokenizer, name, None) or default
    if token is None:
        raise MediaError(f"the tokenizer names no `{name}`; set it in tokenizer_config.json")
    return str(token)
