"""Packs several sequences into one row of the device, so that few computed tokens are padding.

N rows of T tokens of a batch, with one or a few sequences each; R packed rows of L tokens. The
lengths alone determine where a sequence goes, so a resumed run packs in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from policy.cache.media import Media
from policy.cache.paths import Tree
from policy.cache.step import UNKNOWN
from rl.accounting import flops
from rl.training.batch import Batch

# The most different numbers of packed rows without micro-batches. Each number is a shape that
# compiles.
MAX_ROW_COUNTS = 8

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
    """The map from N rows of T tokens to R packed rows of L tokens. L is T or, with trees,
    `Sharing.packed_length(T)`, rounded up to a multiple.

    unpacked_shape: (N, T). shape: (R, L). source, target: flat token indices; token `source[i]` of
    the rows is token `target[i]` of the packed rows. segments: int32[R, L], sequence of each token
    within its packed row, from 1;
    0 on padding and on shared tokens that nothing is trained on.
    filled_rows: packed rows that hold tokens; empty rows come last. runs: (ends, starts), where in
    its sequence each run of tokens that is computed ends and starts. A sequence alone is one run
    from 0.

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
        computed = max(1, -(-self.filled_rows // micro_rows)) * micro_rows * self.shape[1]
        metrics = {"perf/packed_share": self.distinct / computed}
        return metrics | (
            {"perf/shared_prefix": max(1, len(self.source)) / max(1, self.distinct)}
            if shared
            else {}
        )

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
        out, (source, target) = np.full((*self.shape, *trailing), fill, array.dtype), self._written
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
        tokens = self.pack(batch.tokens)
        routes = self.routes(batch)
        kept = None if batch.kept is None else self.pack(batch.kept, fill=-1)
        read = {
            "tokens": tokens,
            "segments": self.segments,
            "routes": routes,
            "kept": kept,
            "tree": self.tree,
        }
        return Batch(mask=None, prompt=None, media=self.media(batch.media), **read)

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
        turns, until = (None if a is None else self.pack(a) for a in (media.turns, media.until))
        return Media(index=self.pack(media.index, fill=-1), turns=turns, until=until)


def plan_packing(segments_NT: np.ndarray, counts: Sequence[int], multiple: int = 1) -> Packing:
    """Packs the rows of a batch, longest first, each into the packed row with the least free space
    that suffices.

    This is best fit decreasing, which needs at most 11/9 of the fewest rows and 4 more (Johnson
    1973). Rows of padding fill up to the first sufficient number of `counts`. The sequences of a
    row (segments 1, 2, ...) stay together and in order: their numbers in the packed row follow each
    other. Packed rows end in padding up to a multiple of `multiple` tokens.
    """
    segments = np.asarray(segments_NT)
    N, T = segments.shape
    lengths = np.count_nonzero(segments, axis=1)
    sequences = segments.max(axis=1, initial=0)
    free, packed_sequences = np.full(N, T), np.zeros(N, np.int32)  # of each packed row
    packed_row, start, first_sequence = (np.zeros(N, np.int32) for _ in range(3))  # of each row
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]:
        r = np.argmin(np.where(free >= lengths[i], free, T + 1))
        packed_row[i], start[i], first_sequence[i] = r, T - free[r], packed_sequences[r]
        free[r] -= lengths[i]
        packed_sequences[r] += sequences[i]
    filled_rows = int(np.count_nonzero(packed_sequences))
    rows = next(count for count in counts if count >= filled_rows)
    row, column = np.nonzero(segments)
    tokens_before = np.cumsum(segments != 0, axis=1)[row, column] - 1
    length = -(-T // multiple) * multiple
    source = row * T + column
    target = packed_row[row] * length + start[row] + tokens_before
    packed_segments = np.zeros((rows, length), np.int32)
    packed_segments.reshape(-1)[target] = first_sequence[row] + segments[row, column]
    ends = flops.lengths(segments)
    return Packing(
        (N, T),
        (rows, length),
        source,
        target,
        packed_segments,
        filled_rows,
        (ends, np.zeros_like(ends)),
    )


def row_counts(sequences: int, multiple: int) -> list[int]:
    """Returns the possible numbers of packed rows: at most MAX_ROW_COUNTS, evenly spaced multiples
    of `multiple`.

    The last number has room for `sequences` packed rows.
    """
    step = -(-sequences // (MAX_ROW_COUNTS * multiple)) * multiple
    return list(range(step, sequences + step, step))
