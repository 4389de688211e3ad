"""Tables of pictures and sounds: the rows of an item are those of `Model.encode`, whatever else is
encoded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from media_oracles import drawn, random_policy

from policy.execution import encoding
from policy.execution.encoding import MediaEncoder
from policy.media import Encoder, GridVision

SHAPES = {kind: [(4, 6), (2, 2), (4, 6), (10, 8)] for kind in ("Qwen3VL", "Qwen2_5_VL")}
SHAPES |= {"Gemma4": [(4, 6), (2, 2)], "Gemma3": [(6, 6)] * 2}
KINDS = [
    "Qwen3VL",
    "Gemma4",
    *(pytest.param(kind, marks=pytest.mark.every_family) for kind in ("Gemma3", "Qwen2_5_VL")),
]


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    model = random_policy(request.param)
    return model, MediaEncoder(model.graph), drawn(model.config.image, SHAPES[request.param])


def with_rows(items):
    starts = np.cumsum([2, *(item.rows for item in items)]).tolist()
    return dict(zip(items, starts, strict=False)), 1 << int(starts[-1]).bit_length()


def test_the_table_holds_the_rows_of_each_item(case):
    model, encoder, inputs = case
    first, M = with_rows(inputs)
    table = encoder.write(model.params, encoder.empty(M), encoder.padded(inputs, first, M))
    assert encoder.encoded == len(inputs)
    free = np.ones(M, bool)
    for item, each in inputs.items():
        N = model.config.image.padded_inputs(len(each))
        values = np.zeros((1, N, each.shape[1]), np.float32)
        values[0, : len(each)] = each
        rows, deep = model.encode("image", values, np.asarray([item.shape]))
        own = slice(first[item], first[item] + item.rows)
        free[own] = False
        np.testing.assert_allclose(table.rows[own], rows[0, : item.rows], atol=1e-5)
        if deep is not None:
            np.testing.assert_allclose(table.deep[:, own], deep[:, 0, : item.rows], atol=1e-5)
    assert not np.asarray(table.rows)[free].any()
    # Another table, other neighbours: the same bits.
    item = list(inputs)[1]
    padded = encoder.padded({item: inputs[item]}, {item: 0}, M)
    alone = encoder.write(model.params, encoder.empty(M), padded)
    start, end = first[item], first[item] + item.rows
    assert np.array_equal(alone.rows[: item.rows], table.rows[start:end])
    back = encoder.copied(table, np.r_[np.arange(start, end), np.full(3, -1)])
    assert np.array_equal(back.rows[: item.rows], alone.rows[: item.rows])
    assert not np.any(back.rows[-3:])


@pytest.mark.slow
def test_gradients_in_pieces_equal_those_of_one_backward_pass(case, monkeypatch):
    monkeypatch.setattr(encoding, "INPUTS", 1)  # a call for each item
    model, encoder, inputs = case
    first, M = with_rows(inputs)
    padded = encoder.padded(inputs, first, M, round_up=True)
    assert len(padded[0].values) > 1
    towers = {path: array for path, array in model.params.items() if path.startswith("image.")}
    empty = encoder.empty(M)
    rng = np.random.default_rng(1)
    weights = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), empty)

    def loss(own):
        table = empty
        for each in padded:
            table = encoder.encoded_into(own, table, each)
        return sum(jnp.sum(a * w) for a, w in zip(table, weights, strict=True) if a is not None)

    constants = {path: towers[path] for path in towers if path in model.graph.untrained}
    trained = {path: array for path, array in towers.items() if path not in constants}
    expected = jax.jit(jax.grad(lambda own: loss(own | constants)))(trained)
    parts = jax.jit(
        lambda own: [encoder.gradients(own, constants, weights, each) for each in padded]
    )(trained)
    parts = jax.tree.map(lambda *each: sum(each), *parts)
    assert any(np.any(np.asarray(g)) for g in expected.values())
    for path, gradient in expected.items():
        np.testing.assert_allclose(parts[path], gradient, atol=1e-5, rtol=1e-4, err_msg=path)


@pytest.mark.parametrize("merge, padded", [(1, 64), (2, 64), (3, 72), (5, 75)])
def test_a_picture_is_padded_to_full_rows(merge, padded):
    spec = GridVision(Encoder(1, 8, 2, 8, "gelu", 1e-6), patch=2, merge=merge, side=4)
    assert spec.padded_inputs(merge**2) == padded
