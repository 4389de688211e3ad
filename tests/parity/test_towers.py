"""Towers of pictures and sounds equal those of transformers, alone and in a batch of several."""

import numpy as np
import pytest
import towers

pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

ALWAYS = ("grid", "windows", "siglip", "pooled", "conformer")
BOUND = 2e-5
CHUNK = 16  # queries are cut


def kinds(always=ALWAYS):
    return [
        pytest.param(name, marks=() if name in always else pytest.mark.every_family)
        for name in towers.KINDS
    ]


@pytest.mark.parametrize("kind", kinds())
def test_rows(kind):
    """All items in one batch, with noise as padding, against transformers."""
    pair = towers.pair(kind)
    rows, features = towers.program(kind, attention_chunk=CHUNK)(*pair.inputs())
    for number, (expected, deep) in enumerate(pair.expected):
        own, own_deep = pair.own(rows, features, number, number)
        np.testing.assert_allclose(own, expected, atol=BOUND, rtol=0, err_msg=f"item {number}")
        assert (deep is None) == (own_deep is None)
        if deep is not None:
            np.testing.assert_allclose(
                own_deep, deep, atol=BOUND, rtol=0, err_msg=f"features of item {number}"
            )


@pytest.mark.parametrize("kind", kinds())
def test_neighbours_and_padding_change_no_bit(kind):
    """In one program: each item at another place, among other items and other padding, and one
    place is empty."""
    pair = towers.pair(kind)
    program, count = towers.program(kind, attention_chunk=CHUNK), len(pair.items)
    first = program(*pair.inputs())
    chosen = [*range(1, count), 0]
    values, shapes = pair.inputs(chosen, seed=10)
    values[0], shapes[0] = 7.0, 0
    second = program(values, shapes)
    for at, number in list(enumerate(chosen))[1:]:
        for a, b in zip(
            pair.own(*first, number, number), pair.own(*second, at, number), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    assert all(np.isfinite(a).all() for a in second if a is not None)


@pytest.mark.parametrize("kind", kinds(("grid",)))
def test_programs_of_other_sizes(kind):
    """An item alone in a longer program, and unrolled."""
    pair = towers.pair(kind)
    first = towers.program(kind, attention_chunk=CHUNK)(*pair.inputs())
    second = towers.program(kind, scan=False, remat="none")(*pair.inputs([1], 2 * pair.kind.padded))
    for a, b in zip(pair.own(*first, 1, 1), pair.own(*second, 0, 1), strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=BOUND / 4, rtol=0)


@pytest.mark.parametrize("kind", kinds(("grid",)))
def test_gradients(kind):
    """Of all weights, with scan and remat, against torch."""
    pair, rng = towers.pair(kind), np.random.default_rng(3)
    factors = [rng.normal(size=rows.shape).astype(np.float32) for rows, _ in pair.expected]
    deep = [
        None if d is None else rng.normal(size=d.shape).astype(np.float32) for _, d in pair.expected
    ]
    ours, theirs = (
        pair.gradients(factors, deep, attention_chunk=CHUNK),
        pair.their_gradients(factors, deep),
    )
    trained = [path for path in theirs if theirs[path].any()]
    assert len(trained) > 10
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    for (
        path
    ) in trained:  # some are 0 but for rounding, like those of key biases where nothing turns
        bound = 1e-4 * np.abs(theirs[path]).max() + 1e-7 * largest
        np.testing.assert_allclose(ours[path], theirs[path], atol=bound, rtol=0, err_msg=path)


def test_axes_of_stacked_bounds():
    """Every dimension of every weight has an axis, also where numbers without one are stacked."""
    from flax import nnx

    for kind in ("pooled_clipped", "conformer"):
        for path, variable in nnx.to_flat_state(nnx.state(towers.pair(kind).module)):
            axes = variable.get_metadata("out_sharding")
            assert len(axes) == len(variable.shape), path
            assert (axes[:1] == ("layers",)) == (path[0] == "blocks"), path
