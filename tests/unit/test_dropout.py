"""Dropout: its share and scale, and that its bits depend on nothing but the row, the layer and the
update."""

import dataclasses

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from learners import batch, host, stage
from oracles import configuration, random_model

from policy import families
from policy.config import Runtime
from policy.modes import make_step
from policy.ops.dropout import Dropout, drop, row_seeds


def test_a_share_of_the_elements_is_dropped_and_the_mean_stays():
    x = jnp.ones((4, 50, 64))
    dropped = np.asarray(drop(x, Dropout(row_seeds(0, 0, 4), rate=0.25)))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert abs((dropped == 0).mean() - 0.25) < 0.02
    assert drop(x, None) is x and drop(x, Dropout(row_seeds(0, 0, 4))) is x


def test_rows_layers_places_updates_and_seeds_have_bits_of_their_own():
    x = jnp.ones((2, 8, 16))
    start = Dropout(row_seeds(3, 5, 2), rate=0.5)
    first = np.asarray(drop(x, start))
    assert (first[0] != first[1]).any()
    others = (
        drop(x, start.for_layer(0)),
        drop(x, start, 1),
        *(drop(x, Dropout(row_seeds(*s, 2), rate=0.5)) for s in ((3, 6), (4, 5))),
    )
    for other in others:
        assert (np.asarray(other) != first).mean() > 0.3
    np.testing.assert_array_equal(
        first, drop(x, Dropout(row_seeds(3, 5, 7)[:2], rate=0.5))
    )  # whatever comes after a row


def logp(model, dropout, **runtime):
    graph = type(model.graph)(model.config, Runtime(**runtime), model.graph.layout)
    data = batch(4)
    step = dataclasses.replace(make_step(data.tokens, segments=data.segments), dropout=dropout)
    return np.asarray(jax.jit(lambda p: graph.logprobs(p, data.tokens, step, 1.0)[0])(model.params))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_scanned_and_unrolled_layers_drop_the_same(kind):
    model = random_model(families.read(configuration(kind)))
    dropout = Dropout(row_seeds(0, 0, 4), rate=0.3)
    plain, scanned, unrolled = (
        logp(model, None),
        logp(model, dropout),
        logp(model, dropout, scan=False, remat="none"),
    )
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5, rtol=0)
    assert np.abs(scanned - plain).max() > 0.1


@pytest.mark.slow
def test_updates_drop_the_same_for_any_micro_batch_and_others_at_the_next_update():
    model, data = learners.dense(), batch()
    result = {}
    for rows in (None, 3):
        trainer, state = learners.begin(model, stage(dropout=0.5, micro_batch=rows))
        losses = []
        for _ in range(2):
            state, metrics = trainer.update(state, data)
            losses.append(float(metrics["loss"]))
        result[rows] = losses, host(state)
    np.testing.assert_allclose(result[None][0], result[3][0], rtol=1e-5)
    for key, array in result[None][1].items():
        np.testing.assert_allclose(array, result[3][1][key], atol=2e-6, err_msg=key)
    trainer, state = learners.begin(model, stage(optimizer={"learning_rate": 1e-12}, dropout=0.5))
    still = []
    for _ in range(2):
        state, metrics = trainer.update(state, data)
        still.append(float(metrics["loss"]))
    assert abs(still[0] - still[1]) > 1e-3
