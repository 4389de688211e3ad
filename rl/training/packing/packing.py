"""Packs several sequences into one row of the device, so that few computed tokens are padding.

N rows of T tokens of a batch, with one or a few sequences each; R packed rows of L tokens. The
lengths alone determine where a sequence goes, so a resumed run packs in the same way.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from policy.cache.media import Media
from policy.cache.paths import Tree
from policy.cache.step import UNKNOWN
from rl.accounting import flops
from rl.training.batch import Batch
from rl.training.packing.row_shapes import (
    RowBounds,
    RowHistory,
    RowShape,
    Sizes,
    choose_shape,
)

PER_TOKEN_FIELDS = (
    "mask",
    "sampler_logp",
    "old_logp",
    "ref_logp",
    "entropy",
    "margin",
    "teacher_ids",
    "teacher_top",
    "teacher_rest",
    "old_values",
    "returns",
    "correct",
)
"""The fields of a batch that always have one value, or one vector, per token, besides those that a
forward pass reads (`Packing.inputs`)."""


@dataclass(frozen=True)
class Packing:
    """The map from N rows of T tokens to R packed rows of L tokens, as
    rl/training/packing/row_shapes.py chooses them.

    unpacked_shape: (N, T). shape: (R, L). source, target: flat token indices; token `source[i]` of
    the rows is token `target[i]` of the packed rows. segments: int32[R, L], the number of each
    token's sequence in its packed row, from 1; 0 on padding and on shared tokens that nothing is
    trained on. filled_rows: how many packed rows hold tokens; empty rows come last. runs: (ends,
    starts), where in its sequence each run of tokens that is computed ends and starts. A sequence
    alone is one run from 0.

    tree: the trees of the packed rows, if sequences share beginnings
    (rl/training/packing/trees.py). Then several tokens have one target, and `writes`, bool of each
    source, tells which of them gives it its values.
    """

    unpacked_shape: tuple[int, int]
    shape: tuple[int, int]
    source: np.ndarray
    target: np.ndarray
    segments: np.ndarray
    filled_rows: int
    runs: tuple[np.ndarray, np.ndarray]
    tree: Tree | None = None
    writes: np.ndarray | None = None

    def metrics(self, micro_rows: int, shared: bool) -> dict[str, float]:
        """Returns the share of computed tokens that are real, if `micro_rows` rows are computed at
        a time. shared: whether to add the tokens of all sequences divided by those that are
        computed."""
        metrics = {"perf/packed_share": self.share(micro_rows)}
        return metrics | (
            {"perf/shared_prefix": max(1, len(self.source)) / max(1, self.distinct)}
            if shared
            else {}
        )

    def share(self, micro_rows: int) -> float:
        """Returns the share of computed tokens that are real, if `micro_rows` rows are computed at
        a time."""
        computed = max(1, -(-self.filled_rows // micro_rows)) * micro_rows * self.shape[1]
        return self.distinct / computed

    @property
    def distinct(self) -> int:
        """Returns the number of tokens that are computed, each shared one once."""
        return len(self.source) if self.writes is None else int(np.count_nonzero(self.writes))

    @cached_property
    def _written(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns `source` and `target` without the tokens that do not write."""
        return (
            (self.source, self.target)
            if self.writes is None
            else (self.source[self.writes], self.target[self.writes])
        )

    def pack(self, array_NT: np.ndarray, fill: float = 0) -> np.ndarray:
        """Packs [N, T, ...] into [R, L, ...], with `fill` on padding."""
        array = np.asarray(array_NT)
        trailing = array.shape[2:]
        out = np.full((*self.shape, *trailing), fill, array.dtype)
        source, target = self._written
        out.reshape(-1, *trailing)[target] = array.reshape(-1, *trailing)[source]
        return out

    def unpack(self, array_RL: np.ndarray) -> np.ndarray:
        """Returns [N, T, ...] from packed rows, 0 on padding."""
        array = np.asarray(array_RL)
        trailing = array.shape[2:]
        out = np.zeros((*self.unpacked_shape, *trailing), array.dtype)
        out.reshape(-1, *trailing)[self.source] = array.reshape(-1, *trailing)[self.target]
        return out

    def pack_row_values(self, array_N: np.ndarray, fill: float = 0) -> np.ndarray:
        """Packs one value per row: returns [R, L], at each token the value of its row in
        `array_N`."""
        array = np.asarray(array_N)
        return self.pack(np.broadcast_to(array[:, None], self.unpacked_shape), fill)

    def batch(self, batch: Batch) -> Batch:
        """Returns the batch in packed rows: `prompt` and `advantages` per token, prompts renumbered
        from 0."""
        prompts, numbers = np.unique(batch.prompt, return_inverse=True)
        by_token = {
            name: self.pack(array)
            for name in PER_TOKEN_FIELDS
            if (array := getattr(batch, name)) is not None
        }
        if batch.advantages is not None:
            by_token["advantages"] = (
                self.pack_row_values if np.ndim(batch.advantages) == 1 else self.pack
            )(batch.advantages)
        extra = (
            None
            if batch.extra is None
            else {name: self.pack(array) for name, array in batch.extra.items()}
        )
        prompt = self.pack_row_values(
            (numbers - np.count_nonzero(prompts < 0)).astype(np.int32), fill=-1
        )
        return self.inputs(batch).replace(**by_token, prompt=prompt, extra=extra)

    def inputs(self, batch: Batch) -> Batch:
        """Returns what a forward pass reads of the batch, in packed rows."""
        return Batch(
            tokens=self.pack(batch.tokens),
            mask=None,
            prompt=None,
            segments=self.segments,
            routes=self.routes(batch),
            kept=None if batch.kept is None else self.pack(batch.kept, fill=-1),
            media=self.media(batch.media),
            tree=self.tree,
        )

    def routes(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """Packs the routes of the batch into [R, L, ...]. A shared token has the route that any
        sequence knows."""
        if batch.routes is None:
            return None
        packed = {path: self.pack(each, fill=UNKNOWN) for path, each in batch.routes.items()}
        if self.writes is not None:
            for path, each in batch.routes.items():
                trailing = each.shape[2:]
                shared = each.reshape(-1, *trailing)[self.source[~self.writes]]
                np.maximum.at(
                    packed[path].reshape(-1, *trailing), self.target[~self.writes], shared
                )
        return packed

    def media(self, media: Media | None) -> Media | None:
        """Packs the places of pictures and sounds. Positions count in each sequence, so they stay
        as they are."""
        if media is None:
            return None
        return Media(
            index=self.pack(media.index, fill=-1),
            turns=None if media.turns is None else self.pack(media.turns),
            until=None if media.until is None else self.pack(media.until),
        )


class Places(NamedTuple):
    """Where sequences lie: the packed row of each, its first place there, and the numbers of the
    sequences before it in that row. rows: packed rows that hold tokens."""

    row: np.ndarray
    start: np.ndarray
    before: np.ndarray
    rows: int


def best_fit(lengths_N: np.ndarray, sequences_N: np.ndarray, length: int) -> Places:
    """Places rows of a batch, longest first, each into the packed row with the least free space
    that suffices.

    This is best fit decreasing, which needs at most 11/9 of the fewest rows and 4 more (Johnson
    1973). lengths, sequences: tokens and sequences of each row; rows without tokens have no place.
    length: tokens of a packed row.
    """
    N = len(lengths_N)
    row, start, before = (np.zeros(N, np.int32) for _ in range(3))
    packed_sequences: list[int] = []
    free: list[tuple[int, int]] = []  # (free tokens, packed row), ascending
    for i in np.argsort(-lengths_N, kind="stable")[: np.count_nonzero(lengths_N)].tolist():
        tokens = int(lengths_N[i])
        at = bisect.bisect_left(free, (tokens, 0))
        if at < len(free):
            left, r = free.pop(at)
        else:
            left, r = length, len(packed_sequences)
            packed_sequences.append(0)
        row[i], start[i], before[i] = r, length - left, packed_sequences[r]
        packed_sequences[r] += int(sequences_N[i])
        bisect.insort(free, (left - tokens, r))
    return Places(row, start, before, len(packed_sequences))


def plan_packing(segments_NT: np.ndarray, rows: int, length: int | None = None) -> Packing:
    """Packs the rows of a batch by `best_fit` into `rows` packed rows, of which the last may stay
    empty.

    The sequences of a row (segments 1, 2, ...) stay together and in order: their numbers in the
    packed row follow each other. length: tokens of a packed row, by default those of a row of the
    batch.
    """
    segments = np.asarray(segments_NT)
    N, T = segments.shape
    L = length or T
    lengths = np.count_nonzero(segments, axis=1)
    places = best_fit(lengths, segments.max(axis=1, initial=0), L)
    assert places.rows <= rows, "the packed rows have room for every batch"
    row, column = np.nonzero(segments)
    tokens_before = np.cumsum(segments != 0, axis=1)[row, column] - 1
    source = row * T + column
    target = places.row[row].astype(np.int64) * L + places.start[row] + tokens_before
    packed_segments = np.zeros((rows, L), np.int32)
    packed_segments.reshape(-1)[target] = places.before[row] + segments[row, column]
    ends = flops.lengths(segments)
    return Packing(
        (N, T),
        (rows, L),
        source,
        target,
        packed_segments,
        places.rows,
        (ends, np.zeros_like(ends)),
    )


def plan_rows(
    segments_NT: np.ndarray, bounds: RowBounds, history: RowHistory | None = None
) -> tuple[Packing, RowShape]:
    """Returns (the packing of the rows of a batch in the shape that fits them, that shape).
    history: as in choose_shape."""
    segments = np.asarray(segments_NT)
    lengths = np.count_nonzero(segments, axis=1)
    sequences = segments.max(axis=1, initial=0)

    @cache
    def filled_rows(length: int) -> int:
        return best_fit(lengths, sequences, length).rows

    sizes = Sizes(int(np.count_nonzero(lengths)), int(lengths.sum()), int(lengths.max(initial=1)))
    shape = choose_shape(bounds, sizes, filled_rows, history)
    filled = filled_rows(shape.length)
    packing = plan_packing(segments, bounds.program_rows(shape, filled), shape.length)
    return packing, shape
