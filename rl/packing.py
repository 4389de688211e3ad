"""Several sequences in one row of the device, so that few of the tokens that are computed are padding.

N sequences, one a row of a batch, R packed rows, T tokens. Where a sequence goes is a function of the lengths alone, so a run
that is resumed packs as it did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policy.layers.replay import UNKNOWN
from rl.batch import Batch

# Without micro-batches packed rows come in so many different numbers: each number is a shape that compiles.
COUNTS = 8


@dataclass(frozen=True)
class Packing:
    """Where the tokens of N rows of T stand in R packed rows of T: token `source[i]` of the one at `target[i]` of the other, both
    counted through all rows. `number` int32[N]: which sequence of its row each one is, from 1. `used`: rows that hold any; the
    others come last."""

    sequences: tuple[int, int]
    shape: tuple[int, int]
    source: np.ndarray
    target: np.ndarray
    number: np.ndarray
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
        by_token = {
            name: self.pack(array)
            for name in ("tokens", "mask", "sampler_logp", "old_logp", "ref_logp", "entropy", "old_values", "returns", "correct")
            if (array := getattr(batch, name)) is not None
        }
        if batch.advantages is not None:
            by_token["advantages"] = (self.spread if np.ndim(batch.advantages) == 1 else self.pack)(batch.advantages)
        routes = self.routes(batch)
        prompt = self.spread((numbers - np.count_nonzero(prompts < 0)).astype(np.int32), fill=-1)
        return Batch(**by_token, segments=self.spread(self.number), prompt=prompt, routes=routes)

    def routes(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """Those of the batch, [R, T, ...]."""
        return None if batch.routes is None else {path: self.pack(each, fill=UNKNOWN) for path, each in batch.routes.items()}


def packing(segments_NT: np.ndarray, counts: Sequence[int]) -> Packing:
    """Longest first, each sequence into the first row with room for it (Johnson 1973: at most 11/9 of the fewest rows that do);
    rows of padding follow up to the first of `counts` that is enough.

    Raises ValueError where a row of the batch holds more than one sequence.
    """
    segments = np.asarray(segments_NT)
    N, T = segments.shape
    if segments.max(initial=0) > 1:
        raise ValueError("a batch holds one sequence a row, of segment 1; these rows are packed already")
    lengths = np.count_nonzero(segments, axis=1)
    room, filled = np.full(N, T), np.zeros(N, np.int32)
    row, start, number = (np.zeros(N, np.int32) for _ in range(3))
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]:
        r = np.argmax(room >= lengths[i])
        row[i], start[i] = r, T - room[r]
        room[r] -= lengths[i]
        filled[r] += 1
        number[i] = filled[r]
    needed = np.count_nonzero(filled)
    rows = next(count for count in counts if count >= needed)
    sequence, place = np.nonzero(segments)
    before = np.cumsum(segments != 0, axis=1)[sequence, place] - 1
    return Packing((N, T), (rows, T), sequence * T + place, row[sequence] * T + start[sequence] + before, number, needed)


def row_counts(sequences: int, multiple: int) -> list[int]:
    """The numbers of packed rows that `sequences` sequences may come in: COUNTS at most, multiples of `multiple`, evenly spaced;
    the last has room for a row each."""
    step = -(-sequences // (COUNTS * multiple)) * multiple
    return list(range(step, sequences + step, step))
