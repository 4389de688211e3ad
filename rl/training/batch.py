"""Builds the rows of a batch: tokens of prompts and completions, padded to one of few lengths.

The batch of a step is split into mini-batches, one for each update, as in PPO. A mini-batch is
split into micro-batches, whose losses and gradients the update sums.

N rows, T tokens, L repeats of a stack, k experts of a token, K likeliest tokens of a teacher, I ids
that filters left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from policy.cache.media import Media
from policy.cache.paths import Tree

# numpy.ndarray on the host, jax.Array on the device.
Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arrays of the batch of a step, of a mini-batch or of a micro-batch; an absent array is
    None.

    On the host a row is one sequence (segment 1) or the two answers of a pair (segments 1 and 2).
    On the device rows are packed (rl/training/packing/packing.py), and `prompt` and `advantages`
    have one value per token. Padding has segment 0 and prompt -1.
    """

    tokens: Array  # int32[N, T]
    # int32[N, T], 0 on padding, and on shared tokens of a tree that nothing is trained on
    segments: Array
    mask: Array  # float32[N, T], 1 on the tokens that are trained on
    # int32[N] or [N, T], index of the group: 0, 1, ... by prompt within the batch; not the prompt
    # id
    prompt: Array
    sampler_logp: Array | None = None  # float32[N, T], as the generator gave them
    old_logp: Array | None = None
    ref_logp: Array | None = None
    entropy: Array | None = None  # at the old weights; gives the threshold of `top_entropy`
    advantages: Array | None = None  # float32[N] or [N, T]
    margin: Array | None = None  # float32[N, T], margin of the pair at each of its tokens
    # int32[N, T, K] and float32[N, T, K]: the teacher's likeliest tokens in place of each token,
    # likeliest first, and their log-probabilities; float32[N, T]: the log-probability of all others
    teacher_ids: Array | None = None
    teacher_top: Array | None = None
    teacher_rest: Array | None = None
    extra: dict[str, Array] | None = (
        None  # float32[N, T], further numbers of the data by name, at each token
    )
    old_values: Array | None = None
    returns: Array | None = None
    correct: Array | None = (
        None  # float32[N, T], 1 on the tokens of completions that the loss imitates
    )
    # float32[N], values of the states after truncated completions, else 0; on the host only
    last_values: Array | None = None
    # int[N, T, L, k] by path of the layer: the experts that computed each token, -1: unknown
    routes: dict[str, Array] | None = None
    # int32[N, T, I]: the ids that the sampler's filters left where it drew each token, in ascending
    # order, or those that they left out, id i as -2 - i; padded with -1. A token without an id has
    # the distribution over all
    kept: Array | None = None
    # int32[N, T], policy version (number of updates) that sampled each token; on the host only
    version: Array | None = None
    dropout: Array | None = None  # uint32[N], the seeds of each row; only inside an update
    # Of rows with pictures or sounds: [N, T], without the table
    media: Media | None = None
    tree: Tree | None = (
        None  # of packed rows whose sequences share beginnings (policy/cache/paths.py)
    )

    @property
    def filled(self) -> Array:
        """Returns bool[N, T]: which tokens are not padding."""
        return (self.segments if self.tree is None else self.tree.node) != 0

    @property
    def filled_tokens(self) -> int:
        """Returns how many tokens of a batch on the host are not padding."""
        return int(np.count_nonzero(self.segments))

    def rows(self, chosen: slice) -> Batch:
        """Returns a slice of the rows."""
        return jax.tree.map(lambda a: a[chosen], self)

    def replace(self, **changes: Any) -> Batch:
        """Returns the batch with other arrays."""
        return dataclasses.replace(self, **changes)

    def without_rows(self, rows_N: np.ndarray) -> Batch:
        """Returns the batch with the rows `rows_N`, bool[N], as padding, which losses, routers and
        counts skip."""
        others_N1 = ~rows_N[:, None]
        return self.replace(
            segments=np.where(others_N1, self.segments, 0).astype(np.int32),
            mask=np.where(others_N1, self.mask, 0).astype(np.float32),
            prompt=np.where(rows_N, -1, self.prompt).astype(np.int32),
        )

    def with_padding(self, rows: int) -> Batch:
        """Returns a batch on the host with so many further rows of padding."""

        def padded(a: np.ndarray) -> np.ndarray:
            return np.concatenate([a, np.zeros((rows, *a.shape[1:]), a.dtype)])

        return jax.tree.map(padded, self).without_rows(
            np.arange(len(self.prompt) + rows) >= len(self.prompt)
        )


def padded_length(longest: int, limit: int) -> int:
    """Returns the row length for a longest row of `longest` tokens, so that at most 8 shapes
    compile.

    It is a multiple of limit / n, where n is the largest number up to 8 for which limit / n is at
    least 64. A long row is filled with several sequences, so its length costs little but attention.
    """
    unit = -(-limit // max(1, min(8, limit // 64)))
    return min(limit, -(-longest // unit) * unit)


def padded_batch(rows: Sequence[Sequence[Any]], limit: int) -> Batch:
    """Returns a batch with one row per (ids, mask, ...), padded on the right."""
    return segmented_batch([(row,) for row in rows], limit)


def segmented_batch(rows: Sequence[Sequence[Sequence[Any]]], limit: int) -> Batch:
    """Returns a batch with one row per list of (ids, mask, ...), which become segments 1, 2, ...;
    padded on the right."""
    N = len(rows)
    T = padded_length(max(sum(len(ids) for ids, *_ in row) for row in rows), limit)
    tokens = np.zeros((N, T), np.int32)
    segments = np.zeros((N, T), np.int32)
    mask = np.zeros((N, T), np.float32)
    for i, row in enumerate(rows):
        start = 0
        for number, (ids, trained, *_) in enumerate(row, start=1):
            columns = slice(start, start := start + len(ids))
            tokens[i, columns] = ids
            segments[i, columns] = number
            mask[i, columns] = trained
    return Batch(tokens=tokens, segments=segments, mask=mask, prompt=np.arange(N, dtype=np.int32))


def scatter_to_mask(values: Sequence[Sequence[float]], mask_NT: np.ndarray) -> np.ndarray:
    """Scatters the values of the masked tokens of each row, in order, to float32[N, T]; 0
    elsewhere."""
    out = np.zeros(mask_NT.shape, np.float32)
    for row, numbers in enumerate(values):
        out[row, np.flatnonzero(mask_NT[row])] = numbers
    return out
