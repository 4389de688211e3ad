"""Draws small pictures and asks one question about each, for models that read pictures. Needs numpy
only.

| question | answers |
|---|---|
| colour | red, green, blue, yellow: of one shape |
| where | upper left, upper right, lower left, lower right: the quarter of one shape |
| count | one to five: how many shapes of any colour and form |
| shape | square, circle, triangle, cross |
| digit | zero to nine, drawn with the seven segments of a calculator |

Place, size, form, colour and background of what is drawn vary, and every pixel has noise. All
numbers are bytes of a hash (SHAKE-128) of the question and the number of the picture, so pictures
are equal on every machine.

Axes: H, W sides in pixels; the pictures are square.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rl.tasks import Split, TaskProblem, hash_share, is_held_out

Question = Literal["colour", "where", "count", "shape", "digit"]

COLOURS = {
    "red": (215, 45, 45),
    "green": (45, 170, 60),
    "blue": (55, 80, 215),
    "yellow": (215, 200, 50),
}
PLACES = ("upper left", "upper right", "lower left", "lower right")
SHAPES = ("square", "circle", "triangle", "cross")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MOST_SHAPES = 5
_TINT = 24  # grey levels by which a colour of the palette varies
# Segments that are lit, from 0 to 9: top, upper left, upper right, middle, lower left, lower right,
# bottom.
_SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the pictures. Raises ValueError for invalid ones."""

    question: Question = "colour"
    """What is asked: colour, where, count, shape or digit."""
    size: int = 32
    """Side of a picture in pixels, 16 to 512."""
    noise: int = 24
    """Most grey levels by which noise changes a pixel, 0 to 100."""
    problems: int = 2000
    """Distinct pictures in both splits together, 10 to 100000; fewer if so many do not differ. A
    picture of 32x32 pixels takes 3 KB of memory."""
    eval_share: float = 0.1
    """Share of the pictures for evaluation, chosen by a hash of the picture without its noise."""

    def __post_init__(self):
        if self.question not in get_args(Question):
            raise ValueError(
                f"`question` must be {', '.join(get_args(Question))}, got {self.question!r}"
            )
        for name, least, most in (("size", 16, 512), ("noise", 0, 100), ("problems", 10, 100_000)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"`{name}` must be an integer from {least} to {most}, got {value!r}"
                )
        if not isinstance(self.eval_share, (int, float)) or not 0 < self.eval_share < 1:
            raise ValueError(f"`eval_share` must lie between 0 and 1, got {self.eval_share!r}")


class HashedIntegers:
    """Integers from the hash of a text, equal on every machine and with every version of numpy."""

    def __init__(self, text: str, pixels: int):
        """pixels: how many bytes `noise` returns."""
        stream = hashlib.shake_128(text.encode()).digest(4 * 64 + pixels)
        self._numbers = iter(np.frombuffer(stream[: 4 * 64], "<u4").tolist())
        self._bytes = np.frombuffer(stream[4 * 64 :], np.uint8)

    def below(self, count: int) -> int:
        """Returns the next integer, from 0 to count - 1."""
        return next(self._numbers) % count

    def between(self, least: int, most: int) -> int:
        """Returns the next integer, from `least` to `most`."""
        return least + self.below(most - least + 1)

    def noise(self, most: int) -> np.ndarray:
        """Returns int32[pixels] from -most to most."""
        return (self._bytes.astype(np.int32) * (2 * most + 1) >> 8) - most


def problems(options: Options, split: Split) -> list[TaskProblem]:
    """Returns the problems of a split: the column `image` holds uint8[H, W, 3], `answer` the
    answer.

    The hash orders the evaluation's, so that the first n are a random sample.
    """
    chosen = [
        each
        for each in _pictures(options)
        if is_held_out(each[0], options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        chosen.sort(key=lambda each: (hash_share(each[0]), each[2].tobytes()))
    prompt = f"{options.question}?"
    return [
        TaskProblem(prompt, answer, {"answer": answer, "image": pixels})
        for _, answer, pixels in chosen
    ]


def _pictures(options: Options) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (text that identifies the picture without noise, answer, pixels), each picture
    once."""
    seen = set()
    for number in range(options.problems):
        draws = HashedIntegers(
            f"pictures {options.question} {options.size} {number}", options.size**2 * 3
        )
        clean = _background(draws, options.size)
        answer = _DRAW[options.question](draws, clean)
        noise = draws.noise(options.noise).reshape(clean.shape)
        pixels = np.clip(clean + noise, 0, 255).astype(np.uint8)
        if (content := pixels.tobytes()) not in seen:
            seen.add(content)
            yield (
                f"{options.question} {hashlib.sha256(clean.tobytes()).hexdigest()}",
                answer,
                pixels,
            )


def _background(draws: HashedIntegers, size: int) -> np.ndarray:
    """Returns int32[H, W, 3]: a dark tint that changes from one side of the picture to the
    other."""
    first, last = ([draws.between(20, 100) for _ in range(3)] for _ in range(2))
    ramp = np.arange(size, dtype=np.int32)[:, None, None]
    line = np.asarray(first, np.int32) + (
        np.asarray(last, np.int32) - np.asarray(first, np.int32)
    ) * ramp // (size - 1)
    full = np.broadcast_to(line, (size, size, 3))
    return np.array(full if draws.below(2) else full.transpose(1, 0, 2))


def _tinted(draws: HashedIntegers, colour: str) -> np.ndarray:
    return np.asarray([level + draws.between(-_TINT, _TINT) for level in COLOURS[colour]], np.int32)


def _mask(shape: str, side: int) -> np.ndarray:
    """Returns bool[side, side], true inside the shape."""
    y, x = np.mgrid[:side, :side]
    middle = side - 1
    third = side // 3
    if shape == "circle":
        return (2 * y - middle) ** 2 + (2 * x - middle) ** 2 <= side**2
    if shape == "triangle":
        return abs(2 * x - middle) <= y + 1
    if shape == "cross":
        return ((y >= third) & (y < side - third)) | ((x >= third) & (x < side - third))
    return np.ones((side, side), bool)


def _paint(clean: np.ndarray, mask: np.ndarray, top: int, left: int, colour: np.ndarray) -> None:
    high, wide = mask.shape
    clean[top : top + high, left : left + wide][mask] = colour


def _one_shape(draws: HashedIntegers, clean: np.ndarray) -> tuple[str, str, str]:
    """Draws one shape within one quarter of the picture. Returns (colour, place, shape)."""
    half = len(clean) // 2
    colour = list(COLOURS)[draws.below(len(COLOURS))]
    shape = SHAPES[draws.below(len(SHAPES))]
    side = draws.between(half // 2, half - 2)
    place = draws.below(len(PLACES))
    top, left = (draws.between(0, half - side) for _ in range(2))
    _paint(
        clean,
        _mask(shape, side),
        top + half * (place // 2),
        left + half * (place % 2),
        _tinted(draws, colour),
    )
    return colour, PLACES[place], shape


def _count(draws: HashedIntegers, clean: np.ndarray) -> str:
    """Draws shapes in some of the 3x3 cells of the picture, so that none covers another."""
    count = draws.between(1, _MOST_SHAPES)
    cell = len(clean) // 3
    cells = list(range(9))
    for _ in range(count):
        row, column = divmod(cells.pop(draws.below(len(cells))), 3)
        side = draws.between(max(3, cell // 2), cell - 2)
        top, left = (draws.between(0, cell - side - 1) for _ in range(2))
        colour = _tinted(draws, list(COLOURS)[draws.below(len(COLOURS))])
        _paint(
            clean,
            _mask(SHAPES[draws.below(len(SHAPES))], side),
            row * cell + top,
            column * cell + left,
            colour,
        )
    return DIGITS[count]


def _digit(draws: HashedIntegers, clean: np.ndarray) -> str:
    size = len(clean)
    digit = draws.below(10)
    high = (
        draws.between(size // 2, size - 4) | 1
    )  # odd, so that the middle segment is in the middle
    wide = high * 5 // 8
    thick = max(1, high // 8)
    mask = np.zeros((high, wide), bool)
    middle = high // 2
    bars = (
        (slice(0, thick), slice(None)),
        (slice(0, middle + 1), slice(0, thick)),
        (slice(0, middle + 1), slice(wide - thick, wide)),
        (slice(middle - thick // 2, middle - thick // 2 + thick), slice(None)),
        (slice(middle, high), slice(0, thick)),
        (slice(middle, high), slice(wide - thick, wide)),
        (slice(high - thick, high), slice(None)),
    )
    for bar, lit in zip(bars, _SEGMENTS[digit], strict=True):
        mask[bar] |= lit == "1"
    colour = _tinted(draws, list(COLOURS)[draws.below(len(COLOURS))])
    _paint(clean, mask, draws.between(0, size - high), draws.between(0, size - wide), colour)
    return DIGITS[digit]


_DRAW: dict[str, Callable[[HashedIntegers, np.ndarray], str]] = {
    "colour": lambda draws, clean: _one_shape(draws, clean)[0],
    "where": lambda draws, clean: _one_shape(draws, clean)[1],
    "shape": lambda draws, clean: _one_shape(draws, clean)[2],
    "count": _count,
    "digit": _digit,
}
