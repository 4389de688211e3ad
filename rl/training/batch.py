"""Rows for the device: tokens of prompts and completions, padded to one of few lengths. N rows, T tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an update is computed from; absent is None. On the host one sequence a row, of segment 1, or the two answers of a pair,
    of segments 1 and 2; packed (rl/training/packing.py) on the device, where prompts and advantages are those of tokens. What only fills
    up has segment 0 and prompt -1."""

    tokens: np.ndarray  # int32[N, T]
    segments: np.ndarray  # int32[N, T], 0 on padding
    mask: np.ndarray  # float32[N, T], 1 on the tokens that are trained on
    prompt: np.ndarray  # int32[N] or [N, T], number of the prompt within the batch
    sampler_logp: np.ndarray | None = None  # float32[N, T], as the generator gave them
    old_logp: np.ndarray | None = None
    ref_logp: np.ndarray | None = None
    entropy: np.ndarray | None = None  # at the old weights; gives the threshold of `top_entropy`
    advantages: np.ndarray | None = None  # float32[N] or [N, T]
    margin: np.ndarray | None = None  # float32[N, T], margin of the pair at each of its tokens
    extra: dict[str, np.ndarray] | None = None  # float32[N, T], further numbers of the data by name, at each token
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    correct: np.ndarray | None = None  # float32[N, T], 1 on the tokens of completions that the loss imitates
    last_values: np.ndarray | None = (
        None  # float32[N], of the states after completions that were cut off, else 0; on the host only
    )
    # int[N, T, R, k] by path of the layer: the experts that computed each token, -1 where they are not known
    routes: dict[str, np.ndarray] | None = None
    version: np.ndarray | None = (
        None  # int32[N, T], updates that the weights had seen which wrote each token; on the host only
    )
    dropout: jax.Array | None = None  # uint32[N], the seeds of each row; only inside an update

    @property
    def real(self) -> int:
        """Tokens that are no padding."""
        return int(np.count_nonzero(self.segments))

    def rows(self, chosen: slice) -> Batch:
        return jax.tree.map(lambda a: a[chosen], self)

    def replace(self, **changes) -> Batch:
        return dataclasses.replace(self, **changes)

    def without(self, rows_N: np.ndarray) -> Batch:
        """The same batch with the rows where `rows` is true turned into rows that only fill it up: no loss, no router and no
        count sees them."""
        still = ~rows_N[:, None]
        return self.replace(
            segments=np.where(still, self.segments, 0).astype(np.int32),
            mask=np.where(still, self.mask, 0).astype(np.float32),
            prompt=np.where(rows_N, -1, self.prompt).astype(np.int32),
        )


def padded_length(longest: int, limit: int) -> int:
    """The row length for a longest row: a multiple of an eighth of `limit`, or of its largest part that has at least 64 tokens, so
    that at most 8 shapes compile. Short sequences are packed into long rows, so that length costs attention only: 64 sequences of
    32 tokens took 202 ms in rows of 32, 222 in rows of 64 and 288 in rows of 128 (an update of 1M weights on two cores, of which
    one more shape took 8 s to compile)."""
    unit = -(-limit // max(1, min(8, limit // 64)))
    return min(limit, -(-longest // unit) * unit)


def pack(rows: Sequence[tuple[Sequence[int], Sequence[int]]], limit: int) -> Batch:
    """One row for each (ids, mask), padded on the right."""
    return together([(row,) for row in rows], limit)


def together(rows: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]], limit: int) -> Batch:
    """One row for each list of (ids, mask), its sequences one after the other as segments 1, 2, ..., padded on the right."""
    N, T = len(rows), padded_length(max(sum(len(ids) for ids, _ in row) for row in rows), limit)
    tokens, segments, mask = np.zeros((N, T), np.int32), np.zeros((N, T), np.int32), np.zeros((N, T), np.float32)
    for i, row in enumerate(rows):
        start = 0
        for number, (ids, trained) in enumerate(row, start=1):
            here = slice(start, start := start + len(ids))
            tokens[i, here], segments[i, here], mask[i, here] = ids, number, trained
    return Batch(tokens=tokens, segments=segments, mask=mask, prompt=np.arange(N, dtype=np.int32))


def spread(values: Sequence[Sequence[float]], mask_NT: np.ndarray) -> np.ndarray:
    """Values of each row's masked tokens, in order, at their places in float32[N, T]; 0 elsewhere."""
    out = np.zeros(mask_NT.shape, np.float32)
    for row, numbers in enumerate(values):
        out[row, np.flatnonzero(mask_NT[row])] = numbers
    return out
