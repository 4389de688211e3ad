"""The ids that filters of the sampler (top_k, top_p, min_p) and forbidden tokens (bad_words,
min_tokens) left, in the batch of a step.

Samples come from a distribution over a part of the vocabulary. With the ids of that part at each
token, every log-probability of the loss is of the same distribution (policy/heads/kept.py), and the
gradient is that of the expected reward of the samples.

N rows, T tokens, K ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from rl.config.stage import SamplingOptions
from rollout.types import FilterSettings, draws_from_part

if TYPE_CHECKING:
    from rl.training.batch import Batch
    from rollout.types import Segment

# Batches whose tokens have few ids have narrower arrays, of 1 / NARROW of the largest width; each
# width is a program.
NARROW = 4


def filters(sampling: SamplingOptions) -> bool:
    """Tells whether tokens may be drawn from a part of the distribution. The tokenizer is not read
    yet: it is taken to have a stop token, which `min_tokens` forbids."""
    return draws_from_part(cast(FilterSettings, sampling), has_stop_token=True)


def most_recorded(sampling: SamplingOptions) -> int:
    """Returns the most ids of a token that a stage with these options records; 0: its loss is over
    all ids."""
    if sampling.filters == "ignore" or not filters(sampling):
        return 0
    return min(sampling.max_kept, sampling.top_k) if sampling.top_k else sampling.max_kept


def with_kept(
    batch: Batch, segments: Sequence[Segment], most: int, vocabulary: int
) -> tuple[Batch, dict[str, float]]:
    """Returns the batch with `kept` and the log-probabilities of the sampler among these ids, and
    metrics.

    The record of a token names the ids that are kept, or those that are left out. A token whose
    record would name more than `most` ids leaves the mask. A token has the distribution over all
    ids if its filters kept the vocabulary, or if its segment has no record, as in checkpoints of an
    earlier version. Row i of the batch is segment i.
    """
    counts = [_counts(segment) for segment in segments]
    named = [
        _named(segment, count, vocabulary) for segment, count in zip(segments, counts, strict=True)
    ]
    every = np.concatenate(counts)
    sizes = np.concatenate(named)
    if not every.any():
        return batch, {}
    overflows = (sizes > most) & (every < vocabulary)
    K = width(int(sizes[sizes <= most].max(initial=1)), min(most, vocabulary))
    kept_NTK = np.full((*batch.mask.shape, K), -1, np.int32)
    assert batch.sampler_logp is not None
    logp_NT = batch.sampler_logp.copy()
    mask_NT = batch.mask.copy()
    for row, (segment, count, size) in enumerate(zip(segments, counts, named, strict=True)):
        if segment.kept is None:
            continue
        columns = np.flatnonzero(segment.policy)
        cut = (size <= most) & (count < vocabulary)
        ids = segment.kept.ids[cut, :K]
        kept_NTK[row, columns[cut], : ids.shape[1]] = ids
        logp_NT[row, columns[cut]] = segment.kept.logprobs[cut]
        mask_NT[row, columns[(size > most) & (count < vocabulary)]] = 0
    metrics = {"sampler/kept_overflow": float(overflows.mean())}
    names_kept = ~np.concatenate([_names_left_out(each) for each in segments]) & (every > 0)
    if names_kept.any():
        metrics["sampler/kept_mean"] = float(every[names_kept].mean())
    return batch.replace(kept=kept_NTK, sampler_logp=logp_NT, mask=mask_NT), metrics


def _counts(segment: Segment) -> np.ndarray:
    """Returns how many ids the filters left at each token of the policy; 0 without a record."""
    if segment.kept is None:
        return np.zeros(np.count_nonzero(segment.policy), np.int32)
    return segment.kept.counts


def _named(segment: Segment, counts: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns how many ids the record of each token of the policy has to name: those that are kept,
    or those that are left out."""
    return np.where(_names_left_out(segment), vocabulary - counts, counts)


def _names_left_out(segment: Segment) -> np.ndarray:
    """Returns of which tokens of the policy the record names the ids that are left out."""
    if segment.kept is None:
        return np.zeros(np.count_nonzero(segment.policy), bool)
    return segment.kept.names_left_out


def width(longest: int, most: int) -> int:
    """Returns the width of the arrays of a batch whose tokens have up to `longest` ids, of `most`
    that are possible."""
    narrow = -(-most // NARROW)
    return narrow if longest <= narrow else most
