"""Rejection-sampling fine-tuning: which completions are kept, and that their loss is the one of
demonstrations."""

import dataclasses

import jax
import numpy as np
import pytest
from algorithms_fixture import LOGP, MASK, close

import rl.algorithms

KEPT = np.array([1.0, 0.0, 0.0, 1.0])


def test_the_best_above_the_threshold_are_kept_and_of_equal_ones_the_first():
    rewards = [[1, 0.6, 0.9], [np.nan, 0.4, 0.7], [1, 1, 1], [0.1, np.nan, 0.2]]
    algorithm = rl.algorithms.get("raft", keep=2, threshold=0.5)
    assert algorithm.advantages(rewards).tolist() == [[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert rl.algorithms.get("raft").advantages(rewards).tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [1, 0, 0],
        [0, 0, 1],
    ]


def test_the_loss_and_its_gradient_are_those_of_demonstrations_of_the_kept_completions():
    raft, sft = rl.algorithms.get("raft"), rl.algorithms.get("sft")

    def inputs(logp, **more):
        return rl.algorithms.PolicyInputs(logp=logp, **more)

    def ours(logp):
        return raft.loss(inputs(logp, mask=MASK, advantages=KEPT))[0]

    def theirs(logp):
        return sft.loss(inputs(logp, mask=MASK * KEPT[:, None]))[0]

    (value, slope), (expected, gradient) = (
        jax.value_and_grad(loss)(LOGP) for loss in (ours, theirs)
    )
    close(value, expected)
    close(slope, gradient)
    assert np.any(gradient)


def test_micro_batches_add_up_and_nothing_kept_has_no_gradient():
    raft = rl.algorithms.get("raft")
    full = raft.with_totals(rl.algorithms.PolicyInputs(logp=LOGP, mask=MASK, advantages=KEPT))
    parts = [
        jax.tree.map(lambda a, i=i: a[i : i + 1] if np.ndim(a) else a, full)
        for i in range(len(MASK))
    ]
    close(sum(raft.loss(part)[0] for part in parts), raft.loss(full)[0])
    none = dataclasses.replace(full, advantages=0 * KEPT)
    assert not np.any(
        jax.grad(lambda logp: raft.loss(dataclasses.replace(none, logp=logp))[0])(LOGP)
    )
    with pytest.raises(ValueError, match="advantages"):
        raft.loss(rl.algorithms.PolicyInputs(logp=LOGP, mask=MASK))


def test_it_has_no_ratio_and_so_no_old_log_probabilities():
    """A stage asks each algorithm where they come from, also under `generator.exact`."""
    assert (
        rl.algorithms.get("raft").old_logp is None
        and rl.algorithms.get("grpo").old_logp == "trainer"
    )
