"""Labelled answers: the loss in numpy, micro-batches, and the answers to other prompts that
estimate the KL."""

import dataclasses

import jax
import numpy as np
import pytest

import rl.algorithms
from rl.config.data import DataOptions
from rl.data.encoded import Row
from rl.data.rows.forms import label_of, read_labelled
from rl.stages.unpaired import batch_of, sequences_of, with_kl

LABELS = np.array([1.0, 0.0, 1.0, 0.0], np.float32)
MASK = np.array([[0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]], np.float32)
RNG = np.random.default_rng(0)
LOGP, REF = (RNG.normal(-2, 1, MASK.shape).astype(np.float32) for _ in range(2))
KL = np.array([0.5, -0.2, 0.9, 0.4], np.float32)


def inputs(kl=KL):
    spread = {"label": LABELS, "kl": kl}
    extra = {name: np.broadcast_to(a[:, None], MASK.shape) for name, a in spread.items()}
    return rl.algorithms.PolicyInputs(mask=MASK, logp=LOGP, ref_logp=REF, extra=extra)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_loss_is_the_formula_and_the_kl_is_at_least_0(sign):
    algorithm = rl.algorithms.get("kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    loss, metrics = algorithm.loss(inputs(sign * KL))
    z, r = max(0.0, (sign * KL).mean()), ((LOGP - REF) * MASK).sum(1)
    good, bad = (1 - 1 / (1 + np.exp(-0.3 * x)) for x in (r - z, z - r))
    np.testing.assert_allclose(loss, np.where(LABELS > 0, 1.5 * good, 0.7 * bad).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["kto/kl"], z, rtol=1e-5)


@pytest.mark.slow
def test_micro_batches_add_up():
    algorithm = rl.algorithms.get("kto")
    full = algorithm.with_totals(inputs())
    parts = [jax.tree.map(lambda a, i=i: a[i : i + 1] if np.ndim(a) else a, full) for i in range(4)]
    slope = jax.grad(lambda logp, part: algorithm.loss(dataclasses.replace(part, logp=logp))[0])
    expected = slope(LOGP, full)
    result = np.concatenate([slope(part.logp, part) for part in parts])
    np.testing.assert_allclose(result, expected, atol=1e-6)
    np.testing.assert_allclose(
        sum(algorithm.loss(part)[0] for part in parts), algorithm.loss(full)[0], atol=1e-6
    )
    assert np.any(expected)


def test_each_prompt_has_the_answer_of_the_row_before_it_in_the_same_update():
    answers = [
        (Row([10 + i] * (i + 1) + [20 + i] * 2, [0] * (i + 1) + [1] * 2), float(i % 2))
        for i in range(4)
    ]
    batch = batch_of(
        sequences_of([row for row, _ in answers], 8, 2), [label for _, label in answers], 8
    )
    others = [batch.tokens[i][batch.segments[i] == 2].tolist() for i in range(4)]
    assert others == [
        [10, 21, 21],
        [11, 11, 20, 20],
        [12, 12, 12, 23, 23],
        [13, 13, 13, 13, 22, 22],
    ]
    batch = batch.replace(
        old_logp=np.full(batch.mask.shape, -1.0), ref_logp=np.full(batch.mask.shape, -1.5)
    )
    alone = with_kl(batch)
    assert alone.segments.max() == 1 and alone.mask.sum() == 8
    assert (alone.extra["kl"] == 1.0).all() and alone.extra["label"][:, 0].tolist() == [0, 1, 0, 1]


def test_a_label_is_read_and_a_pair_is_two_answers():
    options = DataOptions(path="rows.jsonl")
    row = {"prompt": "p", "completion": "c"}
    for label, number in (("True", 1.0), (" 0 ", 0.0), (False, 0.0), (1, 1.0)):
        assert label_of(read_labelled("f:1", row | {"label": label}, options)) == number
    assert read_labelled("f:1", {"prompt": "p", "chosen": "a", "rejected": "b"}, options).pair == (
        "a",
        "b",
    )
    for wrong in (2, [True], {"a": 1}, None, "good"):
        with pytest.raises(ValueError, match="`label` must be true or false"):
            read_labelled("f:1", row | {"label": wrong}, options)
    with pytest.raises(ValueError, match="no column `label`"):
        read_labelled("f:1", row, options)
