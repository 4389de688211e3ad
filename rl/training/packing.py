"""Several sequences in one row of the device, so that few of the tokens that are computed are padding.

N rows of a batch, of one sequence or few, R packed rows, T tokens. Where a sequence goes is a function of the lengths alone, so a
run that is resumed packs as it did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policy.cache.step import UNKNOWN
from rl.training.batch import Batch

# Without micro-batches packed rows come in so many different numbers: each number is a shape that compiles.
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
"""What a batch may hold for each token."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of N rows of T stand in R packed rows of T, or a few more: token `source[i]` of the one at `target[i]` of
    the other, both counted through all rows. `segments` int32[R, T]: which sequence of its row a token is of, from 1. `used`: rows
    that hold any; the others come last."""

    sequences: tuple[int, int]
    shape: tuple[int, int]
    source: np.ndarray
    target: np.ndarray
    segments: np.ndarray
    used: int

    def share(self, micro_rows: int) -> float:
        """Of the tokens that are computed, so many rows at a time, those that are real."""
        computed = max(1, -(-self.used // micro_rows)) * micro_rows * self.shape[1]
        return len(self.source) / computed

    def pack(self, array_NT: np.ndarray, fill=0) -> np.ndarray:
        """[N, T, ...] as [R, T, ...]; `fill` on padding."""
        array = np.asarray(array_NT)
        more = array.shape[2:]
        out = np.full((*self.shape, *more), fill, array.dtype)
        out.reshape(-1, *more)[self.target] = array.reshape(-1, *more)[self.source]
        return out

    def unpack(self, array_RT: np.ndarray) -> np.ndarray:
        """[N, T], 0 on padding."""
        array = np.asarray(array_RT)
        out = np.zeros(self.sequences, array.dtype)
        out.reshape(-1)[self.source] = array.reshape(-1)[self.target]
        return out

    def spread(self, array_N: np.ndarray, fill=0) -> np.ndarray:
        """[R, T]: at each token the number of its sequence."""
        array = np.asarray(array_N)
        return self.pack(np.broadcast_to(array[:, None], self.sequences), fill)

    def batch(self, batch: Batch) -> Batch:
        """The same sequences in packed rows: prompts and advantages are those of tokens, and prompts are numbered anew from 0."""
        prompts, numbers = np.unique(batch.prompt, return_inverse=True)
        by_token = {name: self.pack(array) for name in OF_TOKENS if (array := getattr(batch, name)) is not None}
        if batch.advantages is not None:
            by_token["advantages"] = (self.spread if np.ndim(batch.advantages) == 1 else self.pack)(batch.advantages)
        extra = None if batch.extra is None else {name: self.pack(array) for name, array in batch.extra.items()}
        routes = self.routes(batch)
        prompt = self.spread((numbers - np.count_nonzero(prompts < 0)).astype(np.int32), fill=-1)
        return Batch(**by_token, segments=self.segments, prompt=prompt, extra=extra, routes=routes)

    def routes(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """Those of the batch, [R, T, ...]."""
        return (
            None
            if batch.routes is None
            else {path: self.pack(each, fill=UNKNOWN) for path, each in batch.routes.items()}
        )


def packing(segments_NT: np.ndarray, counts: Sequence[int], multiple: int = 1) -> Packing:
    """Longest first, each row of the batch into the packed row with the least room that is enough (best fit decreasing; Johnson
    1973: at most 11/9 of the fewest rows that do); rows of padding follow up to the first of `counts` that is enough.

    A row of the batch that holds several sequences (segments 1, 2, ...) is moved as one: they stay together and in order, and where
    all rows hold k of them, sequence j of a row is number j modulo k of its packed row. Packed rows end in padding up to a multiple
    of `multiple` tokens.
    """
    segments = np.asarray(segments_NT)
    N, T = segments.shape
    lengths, held = np.count_nonzero(segments, axis=1), segments.max(axis=1, initial=0)
    room, filled = np.full(N, T), np.zeros(N, np.int32)
    row, start, first = (np.zeros(N, np.int32) for _ in range(3))
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]:
        r = np.argmin(np.where(room >= lengths[i], room, T + 1))
        row[i], start[i], first[i] = r, T - room[r], filled[r]
        room[r] -= lengths[i]
        filled[r] += held[i]
    needed = np.count_nonzero(filled)
    rows = next(count for count in counts if count >= needed)
    sequence, place = np.nonzero(segments)
    before = np.cumsum(segments != 0, axis=1)[sequence, place] - 1
    length = -(-T // multiple) * multiple
    source, target = sequence * T + place, row[sequence] * length + start[sequence] + before
    numbers = np.zeros((rows, length), np.int32)
    numbers.reshape(-1)[target] = first[sequence] + segments[sequence, place]
    return Packing((N, T), (rows, length), source, target, numbers, needed)


def row_counts(sequences: int, multiple: int) -> list[int]:
    """The numbers of packed rows that `sequences` sequences may come in: COUNTS at most, multiples of `multiple`, evenly spaced;
    the last has room for a row each."""
    step = -(-sequences // (COUNTS * multiple)) * multiple
    return list(range(step, sequences + step, step))
