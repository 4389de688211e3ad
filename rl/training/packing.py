"""Packs several sequences into one row of the device, so that few computed tokens are padding.

N rows of a batch, with one or a few sequences each, R packed rows, T tokens. The lengths alone determine where a
sequence goes, so a resumed run packs in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policy.cache.step import UNKNOWN
from rl.training.batch import Batch

# How many different numbers of packed rows there are without micro-batches. Each number is a shape that compiles.
COUNTS = 8


OF_TOKENS = (
    "tokens",
    "mask",
    "sampler_logp",
    "old_logp",
    "ref_logp",
    "entropy",
    "margin",
    "old_values",
    "returns",
    "correct",
)
"""The arrays of a batch that have one value per token."""


@dataclass(frozen=True)
class Packing:
    """The map from N rows of T tokens to R packed rows of T tokens or a few more.

    source, target: flat token indices; token `source[i]` of the rows is token `target[i]` of the packed rows. segments:
    int32[R, T], sequence of each token within its packed row, from 1. used: packed rows that hold tokens; empty rows
    come last.
    """

    sequences: tuple[int, int]
    shape: tuple[int, int]
    source: np.ndarray
    target: np.ndarray
    segments: np.ndarray
    used: int

    def share(self, micro_rows: int) -> float:
        """Returns the share of computed tokens that are real, if `micro_rows` rows are computed at a time."""
        computed = max(1, -(-self.used // micro_rows)) * micro_rows * self.shape[1]
        return len(self.source) / computed

    def pack(self, array_NT: np.ndarray, fill: float = 0) -> np.ndarray:
        """Packs [N, T, ...] into [R, T, ...], with `fill` on padding."""
        array = np.asarray(array_NT)
        more = array.shape[2:]
        out = np.full((*self.shape, *more), fill, array.dtype)
        out.reshape(-1, *more)[self.target] = array.reshape(-1, *more)[self.source]
        return out

    def unpack(self, array_RT: np.ndarray) -> np.ndarray:
        """Returns [N, T] from packed rows, 0 on padding."""
        array = np.asarray(array_RT)
        out = np.zeros(self.sequences, array.dtype)
        out.reshape(-1)[self.source] = array.reshape(-1)[self.target]
        return out

    def spread(self, array_N: np.ndarray, fill: float = 0) -> np.ndarray:
        """Returns [R, T]: at each token the value of its row in `array_N`."""
        array = np.asarray(array_N)
        return self.pack(np.broadcast_to(array[:, None], self.sequences), fill)

    def batch(self, batch: Batch) -> Batch:
        """Returns the batch in packed rows: `prompt` and `advantages` per token, prompts renumbered from 0."""
        prompts, numbers = np.unique(batch.prompt, return_inverse=True)
        by_token = {name: self.pack(array) for name in OF_TOKENS if (array := getattr(batch, name)) is not None}
        if batch.advantages is not None:
            by_token["advantages"] = (self.spread if np.ndim(batch.advantages) == 1 else self.pack)(batch.advantages)
        extra = None if batch.extra is None else {name: self.pack(array) for name, array in batch.extra.items()}
        routes = self.routes(batch)
        prompt = self.spread((numbers - np.count_nonzero(prompts < 0)).astype(np.int32), fill=-1)
        return Batch(**by_token, segments=self.segments, prompt=prompt, extra=extra, routes=routes)

    def routes(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """Packs the routes of the batch into [R, T, ...]."""
        return (
            None
            if batch.routes is None
            else {path: self.pack(each, fill=UNKNOWN) for path, each in batch.routes.items()}
        )


def packing(segments_NT: np.ndarray, counts: Sequence[int], multiple: int = 1) -> Packing:
    """Packs the rows of a batch, longest first, each into the packed row with the least sufficient room.

    This is best fit decreasing, which needs at most 11/9 of the fewest rows (Johnson 1973). Rows of padding fill up to
    the first sufficient number of `counts`. The sequences of a row (segments 1, 2, ...) stay together and in order: if
    all rows hold k sequences, sequence j of a row is number j modulo k of its packed row. Packed rows end in padding up
    to a multiple of `multiple` tokens.
    """
    segments = np.asarray(segments_NT)
    N, T = segments.shape
    lengths, held = np.count_nonzero(segments, axis=1), segments.max(axis=1, initial=0)
    room, occupied = np.full(N, T), np.zeros(N, np.int32)
    row, start, first = (np.zeros(N, np.int32) for _ in range(3))
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]:
        r = np.argmin(np.where(room >= lengths[i], room, T + 1))
        row[i], start[i], first[i] = r, T - room[r], occupied[r]
        room[r] -= lengths[i]
        occupied[r] += held[i]
    needed = int(np.count_nonzero(occupied))
    rows = next(count for count in counts if count >= needed)
    sequence, place = np.nonzero(segments)
    before = np.cumsum(segments != 0, axis=1)[sequence, place] - 1
    length = -(-T // multiple) * multiple
    source, target = sequence * T + place, row[sequence] * length + start[sequence] + before
    numbers = np.zeros((rows, length), np.int32)
    numbers.reshape(-1)[target] = first[sequence] + segments[sequence, place]
    return Packing((N, T), (rows, length), source, target, numbers, needed)


def row_counts(sequences: int, multiple: int) -> list[int]:
    """Returns the possible numbers of packed rows: at most COUNTS, evenly spaced multiples of `multiple`.

    The last number has room for one row per sequence.
    """
    step = -(-sequences // (COUNTS * multiple)) * multiple
    return list(range(step, sequences + step, step))
