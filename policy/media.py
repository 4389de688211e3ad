"""Towers as data: what turns a picture or a sound into rows that stand in the place of token
embeddings. Frozen, hashable and free of jax.

A tower reads the patches or frames of an item, which are its inputs, and makes fewer rows of them.

Each tower is a subclass of `Tower`, which says what the others ask of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from policy.specs import Activation

Kind = Literal["image", "audio"]
TOWERS: tuple[Kind, ...] = ("image", "audio")
"""The first parts of the paths of weights of towers."""
SHORTEST = 64
STEP = 2
"""Inputs of the smallest item after padding, and the factor from one size to the next."""


def is_tower(path: str) -> bool:
    """Whether a weight belongs to a tower."""
    return path.partition(".")[0] in TOWERS


@dataclass(frozen=True)
class Item:
    """What a tower reads at once: a picture, a tile of a picture, or a clip of sound. It is known
    before the content is decoded; its place in a table follows from it.

    digest: sha256 of the content; of a tile also "-" and its number.
    shape: (height, width) in patches, or (frames, 1).
    rows: how many rows the tower makes of it.
    """

    kind: Kind
    digest: str
    shape: tuple[int, int]
    rows: int

    @property
    def content(self) -> tuple[Kind, str]:
        """Returns (kind, digest) of the content, which its tiles share."""
        return self.kind, self.digest.partition("-")[0]

    @property
    def is_first(self) -> bool:
        """Whether the items of a content begin with this one."""
        return self.digest.partition("-")[2] in ("", "0")


class Tower:
    """A tower as data; a subclass is a frozen dataclass.

    initializer_range: standard deviation of random weights.
    """

    initializer_range: float

    @property
    def input_width(self) -> int:
        """Returns how many numbers an input has: those of a patch or of a frame."""
        raise NotImplementedError

    def rows_of(self, shape: tuple[int, int]) -> int:
        """Returns how many rows an item has: `shape` is (height, width) in patches, or (frames,
        1).

        Processors (rollout/media/families) count the same from their own configuration; tests
        compare the two.
        """
        raise NotImplementedError

    def padded_inputs(self, inputs: int) -> int:
        """Returns the number of inputs after padding: the next of 64, 128, 256, ..., or what the
        tower says instead."""
        return _padded(inputs)

    def largest_inputs(self, rows: int) -> int:
        """Returns the number of inputs, after padding, of an item with so many rows."""
        raise NotImplementedError


class GridTower(Tower):
    """A tower of pictures of any size, which joins squares of patches to rows. An input is a patch
    of `patch` x `patch` pixels, in `frames` frames."""

    patch: int
    channels: int
    frames: int = 1

    @property
    def input_width(self) -> int:
        return self.channels * self.patch**2 * self.frames

    @property
    def row_side(self) -> int:
        """Returns the patches of a side of a square that becomes a row."""
        raise NotImplementedError

    def rows_of(self, shape: tuple[int, int]) -> int:
        height, width = shape
        return (height // self.row_side) * (width // self.row_side)

    def padded_inputs(self, inputs: int) -> int:
        """Returns the next of 64, 128, 256, ..., each rounded up to full squares."""
        return _padded(inputs, self.row_side**2)

    def largest_inputs(self, rows: int) -> int:
        return self.padded_inputs(rows * self.row_side**2)


class SquareTower(Tower):
    """A tower of items of `side` x `side` patches, which joins smaller squares to rows. An input
    is a patch of `patch` x `patch` pixels."""

    encoder: Encoder
    patch: int
    side: int
    channels: int

    @property
    def initializer_range(self) -> float:
        return self.encoder.initializer_range

    @property
    def input_width(self) -> int:
        return self.channels * self.patch**2

    @property
    def row_side(self) -> int:
        """Returns the patches of a side of a square that becomes a row."""
        raise NotImplementedError

    def rows_of(self, shape: tuple[int, int]) -> int:
        return (self.side // self.row_side) ** 2

    def padded_inputs(self, inputs: int) -> int:
        """Returns the patches of an item."""
        return self.side**2

    def largest_inputs(self, rows: int) -> int:
        return self.side**2


@dataclass(frozen=True)
class Encoder:
    """`depth` pre-norm transformer blocks of `width` with biases everywhere: x +=
    attention(norm(x)), x += feed_forward(norm(x)). Feed-forwards are plain, of `mlp_width`.
    `initializer_range`: standard deviation of random weights of the tower."""

    depth: int
    width: int
    heads: int
    mlp_width: int
    activation: Activation
    eps: float
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        """Returns the dimension of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class GridVision(GridTower):
    """The tower of Qwen3-VL, Qwen3.5 and Qwen3-Omni (arXiv 2511.21631): patches of any grid, rotary
    positions of rows and columns, and `merge` x `merge` patches joined to a row.

    An input is a patch of `patch` x `patch` pixels, flattened as (channel, frame, y, x) with
    `frames` equal frames. Inputs are in the order of the squares that become rows: row and column
    of the square, row and column in it. `side`: rows and columns of the table of positions, which
    is interpolated. `deepstack`: the blocks whose outputs also become features of each row; layer i
    of the decoder adds those of the i-th to its output.
    """

    encoder: Encoder
    patch: int
    merge: int
    side: int
    deepstack: tuple[int, ...] = ()
    channels: int = 3
    frames: int = 2
    theta: float = 1e4

    @property
    def initializer_range(self) -> float:
        return self.encoder.initializer_range

    @property
    def row_side(self) -> int:
        return self.merge


@dataclass(frozen=True)
class WindowVision(GridTower):
    """The tower of Qwen2.5-VL (arXiv 2502.13923): inputs, rotary positions and rows as in
    GridVision; blocks with RMS norms and gated feed-forwards, whose attention stays within windows
    of `window` x `window` rows, except in the blocks `full`."""

    depth: int
    width: int
    heads: int
    mlp_width: int
    activation: Activation
    patch: int
    merge: int
    window: int
    full: tuple[int, ...]
    eps: float = 1e-6
    channels: int = 3
    frames: int = 2
    theta: float = 1e4
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        """Returns the dimension of a head."""
        return self.width // self.heads

    @property
    def window_patches(self) -> int:
        """Returns how many patches a complete window has."""
        return (self.window * self.merge) ** 2

    @property
    def row_side(self) -> int:
        return self.merge


@dataclass(frozen=True)
class Siglip(SquareTower):
    """The tower of Gemma 3: SigLIP (arXiv 2303.15343) on a square of `side` x `side` patches, the
    mean over squares of `pool` x `pool` outputs, a norm and a projection. An input is a patch
    flattened as (channel, y, x), row by row."""

    encoder: Encoder
    patch: int
    side: int
    pool: int
    channels: int = 3

    @property
    def row_side(self) -> int:
        return self.pool


@dataclass(frozen=True)
class TileVision(SquareTower):
    """The tower of Llama 4: tiles of `side` x `side` patches and a class token, rotary positions of
    columns and rows, and `merge` x `merge` outputs joined to a row by an adapter of widths `inner`
    and `out`. An input is a patch flattened as (channel, y, x), row by row."""

    encoder: Encoder
    patch: int
    side: int
    merge: int
    inner: int
    out: int
    channels: int = 3
    theta: float = 1e4

    @property
    def row_side(self) -> int:
        return self.merge


@dataclass(frozen=True)
class PooledVision(GridTower):
    """The vision tower of Gemma 4: patches of any grid, a learned vector for each column and each
    row, blocks like those of its text model, and the mean over squares of `pool` x `pool` outputs.

    An input is a patch flattened as (y, x, channel) with values in 0..1, row by row. `positions`:
    length of the tables of positions. `clipped`: every linear layer bounds its inputs and outputs
    by stored numbers. `standardized`: rows are shifted and scaled by stored vectors.
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    activation: Activation
    eps: float
    patch: int
    pool: int
    positions: int
    theta: float = 100.0
    clipped: bool = False
    standardized: bool = False
    channels: int = 3
    initializer_range: float = 0.02

    @property
    def row_side(self) -> int:
        return self.pool


@dataclass(frozen=True)
class Conformer(Tower):
    """The audio tower of Gemma 4: two convolutions of stride 2 and `channels`, then blocks of a
    feed-forward, attention to the last `context` rows, a causal convolution over `kernel` rows and
    a second feed-forward.

    An input is a frame of `mels` log-mel values. Scores are bounded by `cap`. A feed-forward's
    output is multiplied by `residual`. `out` is the width of the output before the projection to
    the decoder.
    """

    depth: int
    width: int
    heads: int
    mels: int
    channels: tuple[int, int]
    kernel: int
    context: int
    out: int
    activation: Activation = "silu"
    cap: float = 50.0
    residual: float = 0.5
    eps: float = 1e-6
    clipped: bool = True
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        """Returns the dimension of a head."""
        return self.width // self.heads

    @property
    def input_width(self) -> int:
        return self.mels

    def rows_of(self, shape: tuple[int, int]) -> int:
        return halved(shape[0], 2)  # two convolutions of stride 2

    def largest_inputs(self, rows: int) -> int:
        return self.padded_inputs(rows * 4)


@dataclass(frozen=True)
class ChunkedAudio(Tower):
    """The audio tower of Qwen3-Omni (arXiv 2509.17765): chunks of `chunk` frames through three
    convolutions of stride 2 and `channels`, then blocks that attend within windows of `window`
    chunks.

    An input is a frame of `mels` log-mel values. Every chunk is padded to its full length, so that
    the rows of a clip depend on no other clip.
    """

    encoder: Encoder
    mels: int
    channels: int
    window: int
    chunk: int = 100

    @property
    def chunk_rows(self) -> int:
        """Returns the rows of a full chunk."""
        return halved(self.chunk, 3)

    @property
    def initializer_range(self) -> float:
        return self.encoder.initializer_range

    @property
    def input_width(self) -> int:
        return self.mels

    def rows_of(self, shape: tuple[int, int]) -> int:
        chunks, rest = divmod(shape[0], self.chunk)
        return self.chunk_rows * chunks + halved(rest, 3)

    def largest_inputs(self, rows: int) -> int:
        return self.padded_inputs(-(-rows // self.chunk_rows) * self.chunk)


def halved(length: Any, times: int) -> Any:
    """Returns the length after so many convolutions of stride 2; of integers or arrays of
    integers."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def _padded(inputs: int, unit: int = 1) -> int:
    """Returns the first of 64, 128, 256, ..., each rounded up to a multiple of `unit`, that is
    not less than `inputs`."""
    size = SHORTEST
    while (padded := -(-size // unit) * unit) < inputs:
        size *= STEP
    return padded
