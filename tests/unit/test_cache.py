"""What layers read back from a cache. S slots, K heads, C length, D dimension."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import configuration

from policy import families
from policy.attention.dot_product_attention import Mask, attend
from policy.cache import cache as caches
from policy.cache.layer_cache import LayerCache, extend
from policy.cache.step import Step
from policy.cache.transposed_keys import TransposedKeys

S, K, C, D = 3, 2, 8, 4


def a_layer(repeats=1, index=0, value=0.0):
    return LayerCache({"k": jnp.full((repeats, S, K, C, D), value)}, index)


def a_transposed_layer(index=0, value=0.0):
    return LayerCache({"k": TransposedKeys(jnp.full((3, S, K, D, C), value))}, index)


def a_step(positions, segments=None):
    positions = jnp.asarray(positions)
    return Step(positions, jnp.ones_like(positions) if segments is None else jnp.asarray(segments))


def values(tokens, seed=0):
    return np.random.default_rng(seed).normal(size=(S, K, tokens, D)).astype(np.float32)


def test_without_a_cache_the_call_sees_itself():
    new, step = values(2), a_step([[0, 1]] * S)
    visible, cache = extend(None, step, k=jnp.asarray(new))
    assert cache is None
    np.testing.assert_array_equal(visible.arrays["k"], new)
    assert visible.positions is step.positions and visible.segments is step.segments


def test_entries_are_written_at_their_positions_and_nowhere_else():
    new = values(2)
    visible, cache = extend(a_layer(), a_step([[0, 1], [5, 6], [6, 7]]), k=jnp.asarray(new))
    expected = np.zeros((S, K, C, D), np.float32)
    expected[0, :, 0:2], expected[1, :, 5:7], expected[2, :, 6:8] = new
    np.testing.assert_array_equal(visible.arrays["k"], expected)
    np.testing.assert_array_equal(cache.arrays["k"][0], expected)
    np.testing.assert_array_equal(visible.positions, [list(range(C))] * S)


def test_padding_is_not_written_even_where_its_position_is_in_use():
    cache = a_layer(value=9.0)
    step = a_step([[0, 1, 2], [0, 0, 0], [7, 8, 9]], [[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    result = np.asarray(jax.jit(extend)(cache, step, k=jnp.asarray(values(3)))[1].arrays["k"])[0]
    written = (result != 9.0).any(axis=(1, 3))
    assert np.argwhere(written).tolist() == [[0, 0], [0, 1], [2, 7]]


def test_a_layer_of_a_stack_touches_only_its_own_entries():
    new = values(1)
    visible, cache = jax.jit(extend)(
        a_layer(repeats=3, index=jnp.int32(1), value=9.0), a_step([[2]] * S), k=jnp.asarray(new)
    )
    result = np.asarray(cache.arrays["k"])
    np.testing.assert_array_equal(result[[0, 2]], 9.0)
    np.testing.assert_array_equal(result[1, :, :, 2], new[:, :, 0])
    np.testing.assert_array_equal(visible.arrays["k"], result[1])


@pytest.mark.parametrize(
    ("positions", "segments"),
    [
        ([[0, 1], [5, 6], [6, 7]], None),
        ([[2], [0], [7]], None),
        ([[0, 1, 2], [0, 0, 0], [7, 8, 9]], [[1, 1, 0], [0, 0, 0], [1, 0, 0]]),
    ],
)
def test_transposed_keys_are_written_and_read_as_others(positions, segments):
    new = jnp.asarray(values(len(positions[0])))
    step = a_step(positions, segments)
    expected, _ = extend(a_layer(repeats=3, index=1, value=9.0), step, k=new)
    for index in (1, jnp.int32(1)):
        visible, after = jax.jit(extend)(a_transposed_layer(index, 9.0), step, k=new)
        np.testing.assert_array_equal(visible.arrays["k"], expected.arrays["k"])
        np.testing.assert_array_equal(after.arrays["k"].array[0], 9.0)
        assert visible.has_transposed_keys and not expected.has_transposed_keys


def test_one_row_writes_one_transposed_key():
    layer = LayerCache({"k": TransposedKeys(jnp.zeros((1, 1, K, D, C)))}, 0)
    new = jnp.asarray(values(1)[:1])
    visible, _ = jax.jit(lambda new: extend(layer, a_step([[5]]), k=new))(new)
    expected = np.zeros((1, K, C, D), np.float32)
    expected[:, :, 5:6] = new
    np.testing.assert_array_equal(visible.arrays["k"], expected)


def test_a_query_sees_the_same_over_transposed_keys():
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(S, 2 * K, 1, D)), jnp.float32)
    held = jnp.asarray(rng.normal(size=(1, S, K, C, D)), jnp.float32)
    new = {"k": jnp.asarray(values(1)), "v": jnp.asarray(values(1, 2))}
    step = a_step([[3], [0], [7]])
    results = []
    for keys in (held, TransposedKeys(jnp.swapaxes(held, 3, 4))):
        seen, _ = extend(LayerCache({"k": keys, "v": held}, 0), step, **new)
        results.append(
            attend(
                queries,
                seen.arrays["k"],
                seen.arrays["v"],
                Mask(step, seen),
                chunk=8,
                has_transposed_keys=seen.has_transposed_keys,
            )
        )
    np.testing.assert_allclose(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "transposed"),
    [("Qwen3", {}, True), ("Qwen3", {"num_key_value_heads": 4}, False), ("DeepseekV3", {}, False)],
)
def test_keys_are_transposed_where_several_query_heads_read_one(kind, changes, transposed):
    config = families.read(configuration(kind, **changes))
    cache = caches.create(config, S, C, "float32", scan=False, transposes_keys=True)
    arrays = cache[0][0][0]
    assert isinstance(next(iter(arrays.values())), TransposedKeys) == transposed


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_token_are_those_of_the_arrays(kind, dtype):
    config = families.read(configuration(kind))
    for scan in (True, False):
        cache = caches.create(config, S, C, dtype, scan=scan)
        assert sum(a.nbytes for a in jax.tree.leaves(cache)) == S * C * caches.bytes_per_token(
            config, dtype
        )
        assert {str(a.dtype) for a in jax.tree.leaves(cache)} == {dtype}


def test_latent_attention_keeps_the_latent_and_the_rotated_key_only():
    keys = configuration("DeepseekV3")
    numbers = keys["num_hidden_layers"] * (keys["kv_lora_rank"] + keys["qk_rope_head_dim"])
    assert caches.bytes_per_token(families.read(keys), "float32") == 4 * numbers


def test_a_scanned_cache_has_a_part_for_each_stack_and_an_unrolled_one_for_each_layer():
    config = families.read(configuration("DeepseekV3", num_hidden_layers=5))
    assert [len(parts) for parts in caches.create(config, S, C, "float32", scan=True)] == [1, 1]
    assert [len(parts) for parts in caches.create(config, S, C, "float32", scan=False)] == [1, 4]


def test_insert_copies_rows_of_a_shorter_cache_to_slots():
    config = families.read(configuration("Qwen3"))

    def filled(slots, length, seed):
        rng = np.random.default_rng(seed)
        empty = caches.create(config, slots, length, "float32", scan=True)
        return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), empty)

    cache, prefix = filled(4, C, 0), filled(2, 5, 1)
    prefix = jax.tree.map(lambda a: a[:, [1, 0, 0, 0]], prefix)
    result = jax.jit(caches.insert)(
        cache, prefix, np.array([2, 0, 4, 5])
    )  # 4 and 5 lie past the end
    for before, source, after in zip(
        *(jax.tree.leaves(tree) for tree in (cache, prefix, result)), strict=True
    ):
        expected = before.copy()
        expected[:, 2, :, :5], expected[:, 0, :, :5] = source[:, 0], source[:, 1]
        np.testing.assert_array_equal(after, expected)


def test_insert_copies_transposed_keys_of_a_shorter_cache_to_slots():
    config = families.read(configuration("Qwen3"))
    cache = caches.create(config, 4, C, "float32", scan=True, transposes_keys=True)
    prefix = caches.create(config, 3, 5, "float32", scan=True, transposes_keys=True)
    prefix = jax.tree.map(lambda a: a + jnp.arange(1.0, 4.0)[:, None, None, None], prefix)
    result = jax.jit(caches.insert)(cache, prefix, np.array([2, 0, 4]))  # 4 lies past the end
    for name, after in result[0][0][0].items():
        array = jnp.swapaxes(after.array, 3, 4) if isinstance(after, TransposedKeys) else after
        expected = np.zeros(array.shape, np.float32)
        expected[:, 2, :, :5], expected[:, 0, :, :5] = 1.0, 2.0
        np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.parametrize("kind", ["Llama", "NemotronH"])
def test_a_scanned_cache_is_unrolled_to_what_it_came_from(kind):
    """Stacks of several layers and, in NemotronH, stacks that store nothing."""
    config = families.read(configuration(kind))
    empty = caches.create(config, S, C, jnp.float32, scan=False)
    leaves, tree = jax.tree.flatten(empty)
    rng = np.random.default_rng(0)
    filled = jax.tree.unflatten(
        tree, [rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    )
    scanned = caches.scanned(filled)
    assert jax.tree.structure(scanned) == jax.tree.structure(
        caches.create(config, S, C, jnp.float32, scan=True)
    )
    back = caches.unrolled(scanned, config)
    assert jax.tree.structure(back) == tree
    jax.tree.map(np.testing.assert_array_equal, back, filled)
