"""The supervised losses."""

import jax
import numpy as np
import pytest
from algorithms_fixture import LOGP, MASK, close

import rl.algorithms

CHOSEN = LOGP[MASK != 0]


def loss_and_gradient(**options):
    algorithm = rl.algorithms.get("sft", **options)
    return jax.value_and_grad(
        lambda logp: algorithm.loss(rl.algorithms.PolicyInputs(logp=logp, mask=MASK)), has_aux=True
    )(LOGP)


def test_nll_is_the_mean_over_tokens_and_its_gradient_is_even():
    (loss, metrics), gradient = loss_and_gradient()
    close(loss, -CHOSEN.mean())
    close(metrics["nll"], -CHOSEN.mean())
    close(gradient, -MASK / 10)


def test_dft_weighs_each_token_by_its_probability_which_is_held_constant():
    (loss, metrics), gradient = loss_and_gradient(loss_type="dft")
    close(loss, -(np.exp(CHOSEN) * CHOSEN).mean())
    close(metrics["nll"], -CHOSEN.mean())
    close(gradient[MASK != 0], -np.exp(CHOSEN) / 10)


def test_micro_batches_add_up():
    algorithm = rl.algorithms.get("sft")
    total = algorithm.with_totals(rl.algorithms.PolicyInputs(mask=MASK)).num_tokens
    losses = [
        algorithm.loss(
            rl.algorithms.PolicyInputs(logp=LOGP[rows], mask=MASK[rows], num_tokens=total)
        )[0]
        for rows in (slice(0, 1), slice(1, 4))
    ]
    close(np.sum(losses), -CHOSEN.mean())


def test_missing_log_probabilities_are_named():
    with pytest.raises(ValueError, match="logp"):
        rl.algorithms.get("sft").loss(rl.algorithms.PolicyInputs(mask=MASK))
