"""The losses of preferred pairs: numbers from the papers' formulas, whichever way the pairs lie in
rows."""

import dataclasses

import jax
import numpy as np
import pytest

import rl.algorithms
from rl.algorithms._pairs import LOSSES
from rl.training.batch import segmented_batch
from rl.training.packing.packing import plan_packing

BETA, SMOOTHING = 0.3, 0.1
# Tokens before, and in, the chosen and the rejected answer of each pair.
LENGTHS = [((2, 4), (2, 1)), ((1, 2), (1, 5)), ((3, 1), (3, 2)), ((1, 1), (1, 1)), ((2, 3), (2, 6))]


def data():
    """(Batch of five pairs, logp, entropy); what stands outside of the answers is no number."""
    rows = [[([7] * (p + n), [0] * p + [1] * n) for p, n in pair] for pair in LENGTHS]
    batch, rng = segmented_batch(rows, 32), np.random.default_rng(1)
    logp, ref, entropy = (
        np.where(batch.mask, rng.normal(-2, 1, batch.mask.shape), np.nan).astype(np.float32)
        for _ in range(3)
    )
    return batch.replace(ref_logp=ref), logp, entropy


def options(name):
    return {
        "loss_type": name,
        "beta": BETA,
        "label_smoothing": SMOOTHING if name in ("sigmoid", "robust", "exo_pair") else 0.0,
    }


def prepared(name, batch, entropy, **more):
    """(inputs of the full batch, function of a part of them and its logp that gives ((loss,
    metrics), gradient))."""
    algorithm = rl.algorithms.get("dpo", **options(name), **more)
    given = {key: getattr(batch, key) for key in ("mask", "ref_logp", "segments", "prompt")}
    inputs = algorithm.with_totals(rl.algorithms.PolicyInputs(entropy=entropy, **given))

    @jax.jit
    def run(part, logp):
        return jax.value_and_grad(
            lambda x: algorithm.loss(dataclasses.replace(part, logp=x)), has_aux=True
        )(logp)

    return inputs, run


def written(name, w, l, nw, nl):  # noqa: E741
    """The loss of each pair in float64."""
    b, s, z = BETA, SMOOTHING, BETA * (w - l)

    def log_sig(x):
        return -np.log1p(np.exp(-x))

    def sig(x):
        return 1 / (1 + np.exp(-x))

    share = sig(z / 0.05)
    return {
        "sigmoid": -(1 - s) * log_sig(z) - s * log_sig(-z),
        "robust": (-(1 - s) * log_sig(z) + s * log_sig(-z)) / (1 - 2 * s),
        "hinge": np.maximum(0, 1 - z),
        "ipo": (w / nw - l / nl - 1 / (2 * b)) ** 2,
        "sigmoid_norm": -log_sig(b * (w / nw - l / nl)),
        "exo_pair": sig(z) * np.log(sig(z) / (1 - s)) + sig(-z) * np.log(sig(-z) / s),
        "nca_pair": -log_sig(b * w) - 0.5 * log_sig(-b * w) - 0.5 * log_sig(-b * l),
        "bco_pair": -log_sig(b * w) - log_sig(-b * l),
        "apo_zero": 1 - sig(b * w) + sig(b * l),
        "apo_down": sig(b * w) + 1 - sig(b * (w - l)),
        "sppo_hard": (w - 1 / (2 * b)) ** 2 + (l + 1 / (2 * b)) ** 2,
        "discopop": -(1 - share) * log_sig(z) + share * np.exp(-z),
    }[name]


def sums(batch, values):
    """float64[pairs] of both answers."""
    return [
        np.where((batch.segments == k) & (batch.mask != 0), values, 0).astype(np.float64).sum(1)
        for k in (1, 2)
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_metrics_are_those_of_the_formulas(name):
    batch, logp, entropy = data()
    (w, l), (nw, nl) = sums(batch, logp - batch.ref_logp), sums(batch, np.ones_like(logp))
    inputs, run = prepared(name, batch, entropy, nll_coef=0.2)
    (loss, metrics), gradient = run(inputs, logp)
    chosen, rejected = sums(batch, logp)
    nll = -chosen.sum() / nw.sum()
    np.testing.assert_allclose(loss, written(name, w, l, nw, nl).mean() + 0.2 * nll, rtol=2e-6)
    expected = {
        "rewards/chosen": BETA * w.mean(),
        "rewards/rejected": BETA * l.mean(),
        "rewards/margins": BETA * (w - l).mean(),
        "rewards/accuracies": (w > l).mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "nll": nll,
        "entropy": entropy[batch.mask != 0].mean(),
    }
    assert metrics.keys() == expected.keys() and 0 < expected["rewards/accuracies"] < 1
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-6, atol=1e-6, err_msg=key)
    assert not gradient[batch.mask == 0].any() and np.abs(gradient[batch.mask != 0]).max() > 1e-3


@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_packed_rows_and_micro_batches_give_the_same(name):
    batch, logp, entropy = data()
    inputs, run = prepared(name, batch, entropy, nll_coef=0.2)
    (loss, metrics), gradient = run(inputs, logp)
    packing = plan_packing(batch.segments, 5)
    assert 1 < packing.filled_rows < 5 and batch.segments.shape[1] % 2 == 0
    full, run = prepared(name, packing.batch(batch), packing.pack(entropy), nll_coef=0.2)
    losses, every, slopes = [], [], []
    for row in range(packing.filled_rows):
        part = jax.tree.map(lambda a, row=row: a[row : row + 1] if np.ndim(a) else a, full)
        (one, result), slope = run(part, packing.pack(logp)[row : row + 1])
        losses.append(one)
        every.append(result)
        slopes.append(slope)
    np.testing.assert_allclose(sum(losses), loss, rtol=1e-6)
    slopes = np.pad(np.concatenate(slopes), ((0, 5 - packing.filled_rows), (0, 0)))
    np.testing.assert_allclose(packing.unpack(slopes), gradient, atol=1e-6)
    reduced = rl.algorithms.reduce_metrics(jax.tree.map(lambda *each: np.stack(each), *every))
    for key in metrics:
        np.testing.assert_allclose(reduced[key], metrics[key], rtol=1e-6, atol=1e-6, err_msg=key)


def test_what_is_missing_or_does_nothing_is_said():
    with pytest.raises(ValueError, match="ref_logp"):
        rl.algorithms.get("dpo").loss(
            rl.algorithms.PolicyInputs(mask=np.ones((1, 2)), logp=np.ones((1, 2)))
        )
    with pytest.raises(ValueError, match="segments"):
        rl.algorithms.get("dpo").with_totals(rl.algorithms.PolicyInputs(mask=np.ones((1, 2))))
    with pytest.raises(ValueError, match="label_smoothing does nothing with loss_type hinge"):
        rl.algorithms.get("dpo", loss_type="hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match="above 0"):
        rl.algorithms.get("dpo", loss_type="exo_pair")


@pytest.mark.slow
def test_a_reward_model_ranks_the_scores_of_last_tokens_by_their_margin():
    batch, scores, _ = data()
    scores = np.nan_to_num(scores, nan=9.0)  # after every token, those of the prompt too
    margin = np.linspace(-0.5, 2, len(LENGTHS)).astype(np.float32)
    batch = batch.replace(margin=np.broadcast_to(margin[:, None], scores.shape).copy())
    ends = [(p + n, p + n + q + m) for (p, n), (q, m) in LENGTHS]
    chosen, rejected = (
        np.array([scores[row, end[k] - 1] for row, end in enumerate(ends)], np.float64)
        for k in (0, 1)
    )
    expected = (
        np.log1p(np.exp(-(chosen - rejected - margin))).mean()
        + 0.3 * ((chosen + rejected) ** 2).mean()
    )
    algorithm, packing = (
        rl.algorithms.get("reward_model", center_coef=0.3),
        plan_packing(batch.segments, 5),
    )
    assert 1 < packing.filled_rows < 5

    def run(batch, scores):
        given = {key: getattr(batch, key) for key in ("mask", "margin", "segments", "prompt")}
        inputs = algorithm.with_totals(rl.algorithms.PolicyInputs(**given))
        return jax.value_and_grad(
            lambda x: algorithm.loss(dataclasses.replace(inputs, scores=x)), has_aux=True
        )(scores)

    ((loss, metrics), slope), ((packed_loss, packed), packed_slope) = (
        run(batch, scores),
        run(packing.batch(batch), packing.pack(scores, fill=9.0)),
    )
    np.testing.assert_allclose([loss, packed_loss], expected, rtol=1e-6)
    np.testing.assert_allclose(packing.unpack(packed_slope), slope, atol=1e-7)
    assert np.count_nonzero(slope) == 2 * len(LENGTHS)
    both = np.concatenate([chosen, rejected])
    for key, value in {
        "accuracy": (chosen > rejected).mean(),
        "margin": (chosen - rejected).mean(),
        "score_mean": both.mean(),
        "score_min": both.min(),
        "score_max": both.max(),
    }.items():
        np.testing.assert_allclose(
            [metrics[f"reward_model/{key}"], packed[f"reward_model/{key}"]],
            value,
            rtol=1e-6,
            atol=1e-6,
        )
    with pytest.raises(ValueError, match="scores"):
        algorithm.loss(
            rl.algorithms.PolicyInputs(mask=np.ones((1, 2)), segments=np.array([[1, 2]]))
        )
