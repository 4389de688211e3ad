"""Batches of groups with equal beginnings, and trainers with and without trees, for the tests of
shared prefixes."""

from __future__ import annotations

import jax
import learners
import numpy as np

from rl.training.batch import Batch
from rl.training.packing.trees import Sharing

T = 20


def groups(
    vocab: int,
    lengths=((5, (6, 9, 4, 7)), (3, (12, 1, 8)), (9, (2, 10, 5, 5)), (1, (4,))),
    seed=0,
    T=T,
) -> Batch:
    """Groups of completions of uneven lengths: (tokens of the prompt, of each completion)."""
    rng, rows = np.random.default_rng(seed), []
    for number, (prompt, completions) in enumerate(lengths):
        shared = rng.integers(0, vocab, prompt).tolist()
        rows += [(number, shared, rng.integers(0, vocab, n).tolist()) for n in completions]
    N = len(rows)
    tokens, segments, mask = (
        np.zeros((N, T), np.int32),
        np.zeros((N, T), np.int32),
        np.zeros((N, T), np.float32),
    )
    for i, (_, prompt, completion) in enumerate(rows):
        n = len(prompt) + len(completion)
        tokens[i, :n], segments[i, :n], mask[i, len(prompt) : n] = prompt + completion, 1, 1
    noise = rng.normal(-3, 0.3, (4, N, T)).astype(np.float32)
    return Batch(
        tokens=tokens,
        segments=segments,
        mask=mask,
        prompt=np.array([number for number, *_ in rows], np.int32),
        sampler_logp=noise[0],
        old_logp=noise[1],
        ref_logp=noise[2],
        entropy=-noise[3],
        advantages=rng.normal(size=N).astype(np.float32),
        old_values=noise[0],
        returns=noise[1],
    )


def pair(model, options, sharing=Sharing(length_factor=2)):
    """Two trainers of a stage and their equal states: one of sequences alone, one of trees."""
    plain, state = learners.begin(model, options, fresh=True)
    trees, other = learners.begin(model, options, fresh=True)
    trees.sharing = sharing
    return (plain, state), (trees, other)


def differences(one: dict, other: dict) -> dict[str, float]:
    """The norm of the difference of each array, over the norm of the first. Biases of keys have a
    gradient of 0 up to rounding, so norms count as at least a hundredth of the largest."""
    one, other = jax.tree.map(np.asarray, (one, other))
    norms = {k: float(np.linalg.norm(array)) for k, array in one.items()}
    least = max(norms.values()) / 100
    return {k: float(np.linalg.norm(one[k] - other[k]) / max(least, norms[k])) for k in one}


def rows(lists, vocab: int, seed=0) -> Batch:
    """A batch of (prompt, [(token, is trained on), ...]) for each row."""
    rng, N = np.random.default_rng(seed), len(lists)
    tokens, segments, mask = (
        np.zeros((N, T), np.int32),
        np.zeros((N, T), np.int32),
        np.zeros((N, T), np.float32),
    )
    for i, (_, row) in enumerate(lists):
        n = len(row)
        tokens[i, :n], mask[i, :n] = np.array(row).T
        segments[i, :n] = 1
    assert tokens.max() < vocab
    noise = rng.normal(-3, 0.3, (3, N, T)).astype(np.float32)
    return Batch(
        tokens=tokens,
        segments=segments,
        mask=mask,
        prompt=np.array([number for number, _ in lists], np.int32),
        sampler_logp=noise[0],
        old_logp=noise[1],
        ref_logp=noise[2],
        advantages=rng.normal(size=N).astype(np.float32),
    )


def pairs(vocab: int, seed=0) -> Batch:
    """Rows of two answers to one prompt each. Some answers begin with equal tokens, and one pair
    has equal answers."""
    rng, width = np.random.default_rng(seed), 2 * T
    tokens, segments, mask = (
        np.zeros((6, width), np.int32),
        np.zeros((6, width), np.int32),
        np.zeros((6, width)),
    )
    for i, (P, chosen, rejected, equal) in enumerate(
        [(5, 6, 3, 0), (9, 4, 8, 2), (12, 5, 5, 5), (3, 1, 7, 0), (14, 2, 5, 1), (1, 9, 2, 0)]
    ):
        prompt, first = rng.integers(0, vocab, P), rng.integers(0, vocab, chosen)
        second = np.concatenate([first[:equal], rng.integers(0, vocab, rejected - equal)])
        row = np.concatenate([prompt, first, prompt, second])
        n, border = len(row), P + chosen
        tokens[i, :n], segments[i, :border], segments[i, border:n] = row, 1, 2
        mask[i, P:border] = mask[i, border + P : n] = 1
    return Batch(
        tokens=tokens,
        segments=segments,
        mask=mask.astype(np.float32),
        prompt=np.arange(6, dtype=np.int32),
        ref_logp=rng.normal(-3, 0.3, tokens.shape).astype(np.float32),
    )


def moved(
    model, options, data: Batch, sharing=Sharing(length_factor=2), updates=1, alone=None
) -> list[tuple[dict, dict]]:
    """(metrics of the last update, what the weights moved by) of updates of sequences alone, and of
    trees. alone: the batch of the former, if it is another."""
    result = []
    for (trainer, state), batch in zip(
        pair(model, options, sharing), (alone or data, data), strict=True
    ):
        before = learners.host(state)  # an update gives its arrays away
        for _ in range(updates):
            state, metrics = trainer.update(state, batch)
        after = {path: array for path, array in learners.host(state).items() if ".params" in path}
        weights = {path: array.astype(np.float64) - before[path] for path, array in after.items()}
        result.append(({k: float(v) for k, v in metrics.items()}, weights))
    assert result[1][0].pop("perf/shared_prefix") > 1.1
    return result
