"""The sliding-window cache of layers with a window: nothing that a query may see is missing,
nothing else is seen. B rows, C entries, T tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
import stepwise
import tiny
from oracles import KINDS, configuration, random_model, tokens

from policy import families
from policy.cache.layer_cache import LayerCache, extend
from policy.cache.sliding_window import WindowEntries, WithSlidingWindows
from policy.cache.step import Step

WINDOWED = ("gemma3", "qwen3-window", "gpt_oss", "llama4", "deepseek_v4")
WINDOW, C = 4, 9  # room for calls of up to 3 tokens, and 2 that are taken back
MODELS = tiny.GENERATED | {"llama4": ("Llama4", KINDS["Llama4"].standard | KINDS["Llama4"].short)}


def called(cache, positions, segments=None):
    """(entries [B, C] by the token that each holds, positions and segments [B, C], cache); token p
    of row b is 100 b + p.
    """
    positions = np.asarray(positions)
    segments = np.ones_like(positions) if segments is None else np.asarray(segments)
    step = Step(jnp.asarray(positions), jnp.asarray(segments))
    new = jnp.asarray(100.0 * np.arange(len(positions))[:, None] + positions)[:, None, :, None]
    visible, cache = extend(cache, step, k=new)
    return (
        np.asarray(visible.arrays["k"])[:, 0, :, 0],
        np.asarray(visible.positions),
        np.asarray(visible.segments),
        cache,
    )


def in_sight(visible, row, query):
    entries, positions, segments, _ = visible
    seen = (segments[row] == 1) & (positions[row] <= query) & (positions[row] > query - WINDOW)
    return sorted(entries[row][seen].tolist())


def test_a_query_sees_its_window_wherever_the_ring_stands():
    cache = LayerCache({"k": WindowEntries(jnp.full((1, 2, 1, C, 1), -1.0))}, 0)
    at = [0, 20]
    for T in (3, 1, 2, 3, 3, 3, 1, 1, 3):
        *_, cache = result = called(cache, [np.arange(start, start + T) for start in at])
        for row, start in enumerate(at):
            first = 20 * row
            for query in range(start, start + T):
                expected = [
                    100.0 * row + p for p in range(max(query - WINDOW + 1, first), query + 1)
                ]
                assert [e for e in in_sight(result, row, query) if e != -1.0] == expected
        at = [start + T for start in at]


def test_what_was_taken_back_is_out_of_sight():
    cache = LayerCache({"k": WindowEntries(jnp.full((1, 1, 1, C, 1), -1.0))}, 0)
    for start in range(0, 15, 3):
        *_, cache = called(cache, [[start, start + 1, start + 2]])
    *_, cache = called(cache, [[13, 14, 15]])  # 15 and 14 are taken back
    result = called(cache, [[14]])
    assert in_sight(result, 0, 14) == [11, 12, 13, 14]


def test_padding_is_not_written_and_a_row_of_it_sees_nothing():
    cache = LayerCache({"k": WindowEntries(jnp.full((1, 2, 1, C, 1), -1.0))}, 0)
    *_, cache = called(cache, [[0, 1, 2], [0, 1, 2]], [[1, 1, 0], [1, 1, 1]])
    result = called(cache, [[2], [0]], [[1], [0]])
    assert in_sight(result, 0, 2) == [0, 1, 2]
    assert not result[2][1].any() and 100.0 in result[0][1]


def test_a_call_longer_than_a_ring_is_refused():
    with pytest.raises(ValueError, match="10 tokens.*sliding-window cache of 9"):
        called(LayerCache({"k": WindowEntries(jnp.zeros((1, 1, 1, C, 1)))}, 0), [np.arange(10)])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gemma3")) for n in WINDOWED]
)
def test_decoding_over_the_sliding_window_cache_is_the_full_forward_pass(name):
    kind, keys = MODELS[name]
    model = random_model(families.read(configuration(kind, **keys)), seed=3)
    rows, lengths = tokens(2, 24, seed=1), [24, 15]
    back = [spec.mixer.window or getattr(spec.mixer, "chunk", None) for spec in model.config.layers]
    assert min(w for w in back if w) + 5 < 24, "a ring would be longer than the row"
    full, _ = stepwise.forward(model, rows)
    result, _ = stepwise.through_cache(
        model, rows, lengths, 15, chunk=5, capacity=WithSlidingWindows(24, 5)
    )
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(result[row, :length], full[row, :length], atol=2e-5)
