"""Towers as data: what turns a picture or a sound into rows that stand in the place of token
embeddings. Frozen, hashable and free of jax.

An item is a picture, a tile of a picture, or a clip of sound. A tower reads its patches or frames,
which are its inputs, and makes fewer rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from policy.specs import Activation


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
class GridVision:
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


@dataclass(frozen=True)
class WindowVision:
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


@dataclass(frozen=True)
class Siglip:
    """The tower of Gemma 3: SigLIP (arXiv 2303.15343) on a square of `side` x `side` patches, the
    mean over squares of `pool` x `pool` outputs, a norm and a projection. An input is a patch
    flattened as (channel, y, x), row by row."""

    encoder: Encoder
    patch: int
    side: int
    pool: int
    channels: int = 3


@dataclass(frozen=True)
class TileVision:
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


@dataclass(frozen=True)
class PooledVision:
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


@dataclass(frozen=True)
class Conformer:
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


@dataclass(frozen=True)
class ChunkedAudio:
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


Kind = Literal["image", "audio"]
TOWERS: tuple[Kind, ...] = ("image", "audio")
"""The first parts of the paths of weights of towers."""
SHORTEST = 64
STEP = 2
"""Inputs of the smallest item after padding, and the factor from one size to the next."""

Tower = GridVision | WindowVision | Siglip | TileVision | PooledVision | Conformer | ChunkedAudio


def initializer_range(spec: Tower | Encoder) -> float:
    """Returns the standard deviation of a tower's random weights."""
    return (
        spec.initializer_range
        if isinstance(spec, Encoder | WindowVision | PooledVision | Conformer)
        else spec.encoder.initializer_range
    )


def rows_of(spec: Tower, shape: tuple[int, int]) -> int:
    """Returns how many rows an item has: `shape` is (height, width) in patches, or (frames, 1).

    Processors (rollout/media/families) count the same from their own configuration; tests compare
    the two.
    """
    height, width = shape
    match spec:
        case GridVision(merge=k) | WindowVision(merge=k) | PooledVision(pool=k):
            return (height // k) * (width // k)
        case Siglip(side=side, pool=k) | TileVision(side=side, merge=k):
            return (side // k) ** 2
        case Conformer():  # two convolutions of stride 2
            return halved(height, 2)
        case ChunkedAudio():
            return spec.chunk_rows * (height // spec.chunk) + halved(height % spec.chunk, 3)


def input_width(spec: Tower) -> int:
    """Returns how many numbers an input has: those of a patch or of a frame."""
    if isinstance(spec, Conformer | ChunkedAudio):
        return spec.mels
    return (
        spec.channels
        * spec.patch**2
        * (spec.frames if isinstance(spec, GridVision | WindowVision) else 1)
    )


def halved(length: Any, times: int) -> Any:
    """Returns the length after so many convolutions of stride 2; of integers or arrays of
    integers."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def padded_inputs(spec: Tower, inputs: int) -> int:
    """Returns the number of inputs after padding: that of a full item for towers of one size, else
    the next of 64, 128, 256, ..., each rounded up to a multiple of the inputs of a row where a
    tower joins them (GridVision, WindowVision, PooledVision).
    """
    match spec:
        case Siglip(side=side) | TileVision(side=side):
            return side**2
        case GridVision(merge=side) | WindowVision(merge=side) | PooledVision(pool=side):
            unit = side**2
        case _:
            unit = 1
    size = SHORTEST
    while (padded := -(-size // unit) * unit) < inputs:
        size *= STEP
    return padded


def largest_inputs(spec: Tower, rows: int) -> int:
    """Returns the number of inputs, after padding, of an item with so many rows."""
    match spec:
        case GridVision(merge=side) | WindowVision(merge=side) | PooledVision(pool=side):
            return padded_inputs(spec, rows * side**2)
        case ChunkedAudio():
            return padded_inputs(spec, -(-rows // spec.chunk_rows) * spec.chunk)
        case Conformer():
            return padded_inputs(spec, rows * 4)
        case _:
            return padded_inputs(spec, 0)


def is_tower(path: str) -> bool:
    """Whether a weight belongs to a tower."""
    return path.partition(".")[0] in TOWERS
