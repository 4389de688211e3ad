"""Gated delta net against the recurrence, one token after the other, and against the module of
transformers.

B rows, T tokens, E hidden, K key heads, G value heads of each, D and V dimensions of keys and
values, W width of the convolution.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from policy import modes
from policy.cache import cache as caches
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig, GatedDeltaNet, LayerSpec, Norm, Runtime, Stack
from policy.intermediates import Aux
from policy.recurrent.delta_net import DeltaNet
from policy.recurrent.delta_rule import unit_lower_inverse

E, K, D, V, W = 24, 2, 16, 12, 4


def a_config(G=2):
    spec = GatedDeltaNet(
        key_heads=K, value_heads=K * G, key_dim=D, value_dim=V, conv_width=W, norm=Norm(eps=1e-6)
    )
    return DecoderConfig(
        32, E, (Stack((LayerSpec(spec, None),), 2),), Norm(), family="none", hf="{}"
    )


@functools.cache
def a_layer(G=2):
    """(forward(weights, x, step, cache), shapes of the weights by name)."""
    config = a_config(G)
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(
            nnx.eval_shape(lambda: DeltaNet(config.layers[0].mixer, config, nnx.Rngs(0)))
        )
    shapes = {
        ".".join(map(str, path)): variable.shape for path, variable in nnx.to_flat_state(state)
    }
    structure = jax.tree.structure(state)

    @functools.partial(jax.jit, static_argnames="runtime")
    def forward(weights, x_BTE, step, cache=None, runtime=Runtime()):
        layer = nnx.merge(graph, jax.tree.unflatten(structure, [weights[name] for name in shapes]))
        result = layer(x_BTE, step, cache, runtime)
        return result if runtime.tentative else result[:2]

    return forward, shapes


def random_weights(G=2, std=0.3, seed=0):
    """Matrices and kernels N(0, std); norm, decay and time step moved, so that each bites."""
    rng = np.random.default_rng(seed)
    center = {"norm.weight": (1.0, 0.3), "dt_bias": (1.0, 0.3), "A_log": (0.5, 1.5)}
    return {
        name: rng.normal(*center.get(name, (0, std)), s).astype(np.float32)
        for name, s in a_layer(G)[1].items()
    }


def inputs(B, T, seed=1):
    return np.random.default_rng(seed).normal(size=(B, T, E)).astype(np.float32)


def segments_of(*lengths):
    """One row; a negative length is padding."""
    return np.repeat([0 if n < 0 else i + 1 for i, n in enumerate(lengths)], np.abs(lengths))[None]


def a_step(segments_BT):
    return modes.make_step(segments_BT, segments=segments_BT)


def loop(body, carry, xs):
    outs = []
    for i in range(len(xs[0])):
        carry, out = body(carry, [x[i] for x in xs])
        outs.append(out)
    return carry, np.stack(outs)


def recurrence(weights, x_TE, xp=np, scan=loop):
    """One document alone, by the definition; float64 with numpy."""
    w = {name: a.astype(np.float64) if xp is np else a for name, a in weights.items()}
    T, (_, G) = len(x_TE), w["A_log"].shape
    q, k, v, z, b, a = (xp.einsum("te,ekd->tkd", x_TE, w[f"{name}_proj"]) for name in "qkvzba")

    def convolved(y, kernel_KDW):
        taps = xp.pad(y, ((W - 1, 0), (0, 0), (0, 0)))[np.arange(T)[:, None] + np.arange(W)]
        y = xp.einsum("twkd,kdw->tkd", taps, kernel_KDW)
        return y / (1 + xp.exp(-y))

    def heads(y):
        return y.reshape(T, K * G, -1)

    q, k, v = (convolved(y, w[f"{name}_conv"]) for y, name in ((q, "q"), (k, "k"), (v, "v")))
    q, k = (xp.repeat(y / xp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6), G, axis=1) for y in (q, k))
    beta = 1 / (1 + xp.exp(-b.reshape(T, -1)))
    g = -xp.exp(w["A_log"].reshape(-1)) * xp.logaddexp(
        0.0, a.reshape(T, -1) + w["dt_bias"].reshape(-1)
    )

    def token(S, now):
        q, k, v, beta, g = now
        S = xp.exp(g)[:, None, None] * S
        u = beta[:, None] * (v - xp.einsum("hdv,hd->hv", S, k))
        S = S + k[:, :, None] * u[:, None, :]
        return S, xp.einsum("hdv,hd->hv", S, q)

    _, o = scan(token, xp.zeros((K * G, D, V)), (q / np.sqrt(D), k, heads(v), beta, g))
    o = o / xp.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    o = o * heads(z) / (1 + xp.exp(-heads(z)))
    return xp.einsum("tkv,kve->te", o.reshape(T, K, -1), w["o_proj"])


def close(actual, expected, tolerance=2e-5):
    """Relative to the largest of `expected`."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("T", "G"), [(1, 2), (5, 2), (64, 2), (70, 2), (130, 2), (130, 1), (130, 4)]
)
def test_a_document_gives_what_the_recurrence_gives(T, G):
    x, weights = inputs(2, T), random_weights(G)
    result, cache = a_layer(G)[0](weights, x, a_step(np.ones((2, T), int)))
    assert cache is None
    close(result, np.stack([recurrence(weights, row) for row in x]))


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 2, 3, 60, 64),
        (130,),
        (-9, 121),
        (121, -9),
        (-3, 40, -2, 70, 10, -5),
        (64, 66),
        (63, 1, 66),
    ],
    ids=lambda lengths: "_".join(map(str, lengths)),
)
def test_each_document_of_a_row_gives_what_it_gives_alone_and_padding_gives_nothing(lengths):
    segments, x, weights = segments_of(*lengths), inputs(1, 130), random_weights()
    result = np.asarray(a_layer()[0](weights, x, a_step(segments))[0])
    for n in np.unique(segments):
        here = segments[0] == n
        if n == 0:
            np.testing.assert_array_equal(result[0, here], 0.0)
        else:
            close(result[0, here], recurrence(weights, x[0, here]))


def test_what_stands_on_padding_changes_nothing():
    segments, x, weights = segments_of(-4, 50, -5, 61, -10), inputs(1, 130), random_weights()
    other = np.where((segments != 0)[..., None], x, 1e4).astype(np.float32)
    result, moved = (a_layer()[0](weights, each, a_step(segments))[0] for each in (x, other))
    np.testing.assert_array_equal(result, moved)


def test_gradients_are_those_of_the_recurrence():
    segments, x, weights = segments_of(-4, 70, -6, 50), inputs(1, 130), random_weights()
    cotangent = inputs(1, 130, seed=2) * (segments != 0)[..., None]
    step = a_step(segments)

    def ours(weights, x):
        return jnp.sum(a_layer()[0](weights, x, step)[0] * cotangent)

    def plain(weights, x):
        total = 0.0
        for n in set(segments[0]) - {0}:
            here = np.flatnonzero(segments[0] == n)
            total += jnp.sum(
                recurrence(weights, x[0, here], jnp, jax.lax.scan) * cotangent[0, here]
            )
        return total

    result, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(weights, x) for f in (ours, plain))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        close(a, b, 1e-4)


def an_empty_cache(slots, dtype="float32"):
    return LayerCache(caches.create(a_config(), slots, 7, dtype, scan=True)[0][0][0], 1)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_calls_of_any_size_and_then_single_tokens_give_what_one_call_gives(size):
    """Rows of 90, 3 and 0 tokens in calls of `size`; then two tokens more, of which the second row
    makes one."""
    lengths, x, weights = np.array([90, 3, 0]), inputs(3, 128), random_weights()
    forward, cache = a_layer()[0], an_empty_cache(3)
    result = np.zeros_like(x)
    for start in range(0, 90, size):
        positions = start + np.broadcast_to(np.arange(size), (3, size))
        segments = (positions < lengths[:, None]).astype(int)
        out, cache = forward(weights, x[:, start : start + size], Step(positions, segments), cache)
        result[:, start : start + size] += out
    for more in range(2):
        active = np.array([[1], [more == 0], [0]], dtype=int)
        at = (lengths + more)[:, None]
        out, cache = forward(
            weights, np.take_along_axis(x, at[..., None], axis=1), Step(at, active), cache
        )
        result[np.arange(3), lengths + more] += np.asarray(out[:, 0])
    close(result[0, :92], recurrence(weights, x[0, :92]))
    close(result[1, :4], recurrence(weights, x[1, :4]))
    np.testing.assert_array_equal(result[2], 0.0)
    for array in cache.arrays.values():
        np.testing.assert_array_equal(array[0], 0.0)  # the other layer of the stack
        np.testing.assert_array_equal(array[1, 2], 0.0)
        assert np.abs(array[1, :2]).min(axis=(0, 1, 3)).max() > 0


@pytest.mark.parametrize("T", [1, 7, 64])
def test_slots_that_are_not_active_keep_window_and_state_to_the_bit(T):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=a.shape).astype(np.float32)
        for name, a in an_empty_cache(3).arrays.items()
    }
    segments = np.array([[0], [1], [0]]).repeat(T, axis=1)
    _, after = a_layer()[0](
        random_weights(),
        inputs(3, T),
        Step(segments * np.arange(T), segments),
        LayerCache(arrays, 1),
    )
    for name, before in arrays.items():
        result = np.asarray(after.arrays[name])
        np.testing.assert_array_equal(result[0], before[0])
        np.testing.assert_array_equal(result[1, [0, 2]], before[1, [0, 2]])
        assert (result[1, 1] != before[1, 1]).any(axis=-1).any()


@pytest.mark.parametrize("scan", [True, False])
def test_tokens_that_are_taken_back_leave_window_and_state_as_if_they_had_not_been_fed(scan):
    """Four slots keep 0 to 3 of three tokens, after five that all keep."""
    forward, weights, repeats, kept = a_layer()[0], random_weights(), 2, np.arange(4)
    first, then, places = inputs(4, 5), inputs(4, 3, seed=2), np.broadcast_to(np.arange(3), (4, 3))
    cache = caches.create(a_config(), 4, 9, "float32", scan=scan)
    number = (lambda r: (0, r)) if scan else (lambda r: (r, 0))  # part, and index in it

    def verified(cache, arrays, r):
        parts = list(cache[0])
        parts[number(r)[0]] = (arrays,)
        return (tuple(parts),)

    five = Step(np.broadcast_to(np.arange(5), (4, 5)), np.ones((4, 5), int))
    for r in range(repeats):
        part, index = number(r)
        cache = verified(
            cache, forward(weights, first, five, LayerCache(cache[0][part][0], index))[1].arrays, r
        )
    tentative, expected = [], cache
    for r in range(repeats):
        part, index = number(r)
        step, view = Step(5 + places, np.ones((4, 3), int)), LayerCache(cache[0][part][0], index)
        out, after, result = forward(weights, (r + 1) * then, step, view, Runtime(tentative=True))
        assert all((after.arrays[name] == view.arrays[name]).all() for name in view.arrays)
        plain = forward(weights, (r + 1) * then, step, view)
        close(out, plain[0], 1e-5)
        tentative.append(result)
        few = Step(5 + places, (places < kept[:, None]).astype(int))
        after = forward(weights, (r + 1) * then, few, LayerCache(expected[0][part][0], index))[1]
        expected = verified(expected, after.arrays, r)
    aux = Aux({"stacks.0.layers.0": jax.tree.map(lambda *a: jnp.stack(a), *tentative)})
    result = caches.commit(cache, aux, jnp.asarray(kept))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        close(a, b, 1e-5)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a[:, 0], b[:, 0])


def test_a_short_prefix_is_inserted_in_full():
    _, prefix = a_layer()[0](
        random_weights(), inputs(3, 7), a_step(np.ones((3, 7), int)), an_empty_cache(3)
    )
    longer = caches.create(a_config(), 3, 50, "float32", scan=True)[0][0][0]
    result = caches.insert(
        longer, jax.tree.map(lambda a: a[:, [1, 0, 0]], prefix.arrays), np.array([2, 3, 4])
    )
    for name, array in result.items():
        assert array.shape[2:] == prefix.arrays[name].shape[2:]
        np.testing.assert_array_equal(array[:, 2], prefix.arrays[name][:, 1])
        np.testing.assert_array_equal(array[:, :2], 0.0)


def test_the_cache_holds_a_state_in_float32_and_a_window_and_nothing_for_each_token():
    config = a_config()
    (part,), *_ = caches.create(config, 3, 50, "bfloat16", scan=True)
    shapes = {name: (array.shape, str(array.dtype)) for name, array in part[0].items()}
    assert shapes == {
        "state": ((2, 3, 2 * K, D, V), "float32"),
        "conv": ((2, 3, 1, W - 1, K * (2 * D + 2 * V)), "bfloat16"),
    }
    assert caches.bytes_per_token(config, "bfloat16") == 0


def test_bfloat16_rounds_the_inputs_and_not_the_state():
    weights, x = random_weights(), inputs(2, 70)
    out, cache = a_layer()[0](
        weights,
        x.astype(jnp.bfloat16),
        a_step(np.ones((2, 70), int)),
        an_empty_cache(2, "bfloat16"),
    )
    assert out.dtype == jnp.bfloat16
    assert {name: str(a.dtype) for name, a in cache.arrays.items()} == {
        "state": "float32",
        "conv": "bfloat16",
    }
    error = np.asarray(out, np.float64) - np.stack([recurrence(weights, row) for row in x])
    assert 1e-4 < np.sqrt(np.mean(error**2)) < 0.05


def test_fresh_decays_are_those_of_the_published_models():
    config = a_config(G=64)

    @jax.jit
    def fresh():
        layer = DeltaNet(config.layers[0].mixer, config, nnx.Rngs(0))
        return jnp.exp(layer.A_log[...]), layer.dt_bias[...], layer.norm.weight[...]

    with nnx.use_eager_sharding(False):
        A, dt_bias, norm = map(np.asarray, fresh())
    assert A.shape == dt_bias.shape == (K, 64)
    assert 0.01 <= A.min() < 1.5 and 14.5 < A.max() <= 16 and 6 < A.mean() < 10
    assert (dt_bias == 1).all() and (norm == 1).all()


@pytest.mark.parametrize("C", [1, 5, 37, 64])
def test_the_inverse_solves_the_system_even_for_equal_keys(C):
    rng = np.random.default_rng(0)
    for a in (rng.normal(size=(3, C, C)) * 0.3, np.ones((3, C, C))):
        expected = np.linalg.inv(np.eye(C) + np.tril(a, -1))
        close(unit_lower_inverse(jnp.asarray(a, jnp.float32)), expected, 1e-5)


def test_value_heads_that_key_heads_cannot_share_are_refused():
    with pytest.raises(ValueError, match="5 value heads cannot be shared by 2 key heads"):
        GatedDeltaNet(key_heads=2, value_heads=5, key_dim=D, value_dim=V, conv_width=W, norm=Norm())


@pytest.mark.parametrize("G", [1, 2, 4])
def test_transformers_computes_the_same(G):
    torch = pytest.importorskip("torch")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    weights, x = random_weights(G, std=0.1), inputs(2, 130)
    config = Qwen3NextConfig(
        hidden_size=E,
        linear_num_key_heads=K,
        linear_num_value_heads=K * G,
        linear_key_head_dim=D,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=W,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0).float().eval()

    def rows_by_key_head(parts):
        return np.concatenate(
            [weights[f"{part}_proj"].transpose(1, 2, 0) for part in parts], axis=1
        ).reshape(-1, E)

    state = {
        "in_proj_qkvz.weight": rows_by_key_head("qkvz"),
        "in_proj_ba.weight": rows_by_key_head("ba"),
        "conv1d.weight": np.concatenate(
            [weights[f"{part}_conv"].reshape(-1, 1, W) for part in "qkv"]
        ),
        "A_log": weights["A_log"].reshape(-1),
        "dt_bias": weights["dt_bias"].reshape(-1),
        "norm.weight": weights["norm.weight"],
        "out_proj.weight": weights["o_proj"].reshape(-1, E).T,
    }
    theirs.load_state_dict({name: torch.tensor(a.copy()) for name, a in state.items()})
    mask = np.ones((2, 130), int)
    mask[0, :9] = 0  # padding on the left
    with torch.no_grad():
        expected = theirs(torch.tensor(x), attention_mask=torch.tensor(mask)).numpy()
    result = a_layer(G)[0](weights, x, a_step(mask))[0]
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)
