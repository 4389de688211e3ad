"""Rows for the device from the groups of a step.

P prompts, G trajectories of each; N rows, one for each segment of a trajectory (P G of them where
each has one); T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.training.batch import Batch
    from rollout.media.expand import Expanded
    from rollout.types import Segment


def to_batch(
    rollouts: Rollouts, limit: int, *, replay: bool = False, values: bool = False
) -> Batch:
    """Returns one row for each segment (`Rollouts.rows`). The mask covers the tokens that the
    policy wrote.

    limit: length of the longest row allowed. replay: adds the experts that the generator sent each
    token to. values: adds the values of a critic, if the generator computed them.
    """
    from rl.training.batch import padded_batch

    rows = rollouts.rows
    segments = [row.segment for row in rows]
    batch = padded_batch([(segment.tokens, segment.policy) for segment in segments], limit)
    shape = batch.tokens.shape

    def padded(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        result = np.zeros(shape, dtype)
        for row, array in enumerate(arrays):
            result[row, : len(array)] = array
        return result

    recorded = [segment.values for segment in segments if segment.values is not None]
    has_values = values and len(recorded) == len(segments)
    return batch.replace(
        prompt=np.asarray([row.group for row in rows], np.int32),
        sampler_logp=padded((segment.logprobs for segment in segments), np.float32),
        version=padded((segment.versions for segment in segments), np.int32),
        old_values=padded(recorded, np.float32) if has_values else None,
        routes=routes_of(segments, shape[1]) if replay else None,
    )


def expanded_at(rollouts: Rollouts) -> list[tuple[int, int, Expanded | None]]:
    """Returns (row, first column, pictures and sounds of the prompt) of each row of `to_batch`."""
    shown = [group.problem.expanded for group in rollouts.groups]
    if any(shown):
        for trajectory in rollouts.trajectories:
            trajectory.only_segment("a batch with pictures or sounds")
    return [(number, 0, shown[row.group]) for number, row in enumerate(rollouts.rows)]


def by_row(rollouts: Rollouts, values: ArrayLike) -> np.ndarray:
    """Returns for each row of `to_batch` the value of its trajectory: array[N, ...]. values:
    array[P * G, ...], one of each trajectory."""
    return np.asarray(values)[[row.trajectory for row in rollouts.rows]]


def one_row_each(rollouts: Rollouts, reader: str) -> None:
    """Raises ValueError, which names the reader, unless each trajectory is one row."""
    for trajectory in rollouts.trajectories:
        trajectory.only_segment(reader)


def routes_of(segments: Sequence[Segment], length: int) -> dict[str, np.ndarray]:
    """Returns Batch.routes of these segments, in rows of `length` tokens."""
    from policy.cache.step import UNKNOWN

    first = segments[0].routes or {}
    result = {
        path: np.full((len(segments), length, *a.shape[1:]), UNKNOWN, a.dtype)
        for path, a in first.items()
    }
    for row, segment in enumerate(segments):
        assert segment.routes is not None, "the generator records routes if a stage replays them"
        for path, experts in segment.routes.items():
            result[path][row, : len(experts)] = experts
    return result
