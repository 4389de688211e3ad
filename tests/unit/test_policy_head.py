"""Log-probabilities and entropies by tiles of the vocabulary, with logits that are kept and that
are computed again, equal what plain automatic differentiation gives with all logits at hand."""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import configuration, random_model, tokens

from policy import families
from policy.config import LogitScaling
from policy.heads import head
from policy.mesh.sharding import layout
from policy.modes import make_step
from rl.accounting.activations import kept_logits

M, E, V = 13, 6, 11


def plain(hidden, weight, targets, temperature, scaling=LogitScaling(), tiling=None):
    z = scaling.scale * jnp.einsum("me,ve->mv", hidden, weight)
    cap = scaling.softcap
    z = (z if cap is None else cap * jnp.tanh(z / cap)) / temperature
    log_p = jax.nn.log_softmax(z, axis=-1)
    logp = jnp.take_along_axis(log_p, targets.reshape(len(targets), -1), axis=1).reshape(
        targets.shape
    )
    return logp, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def inputs():
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=shape).astype(np.float32) for shape in ((M, E), (V, E), (M,), (M,)))
    return *(jnp.asarray(a) for a in arrays), jnp.asarray(rng.integers(0, V, M))


def tile_of(monkeypatch, tokens, *, keeps):
    """Sets the size of tiles that are chosen by size, and whether their logits are kept."""
    monkeypatch.setattr(head, "LEAST_TOKENS", tokens)
    monkeypatch.setattr(head, "CPU_TILE_LOGITS", 1)
    monkeypatch.setattr(head, "KEPT_SHARE", float(keeps))


# Tiles of one token, with a remainder, of all tokens.
@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(tokens, keeps, temperature, monkeypatch):
    tile_of(monkeypatch, tokens, keeps=keeps)
    hidden, weight, a, b, targets = inputs()

    def loss(function):
        def of(hidden, weight):
            logp, entropy = function(hidden, weight, targets, temperature)
            return jnp.sum(a * logp + b * entropy), (logp, entropy)

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))(hidden, weight)

    with jax.default_matmul_precision("highest"):
        (_, result), actual_gradients = loss(head.logprobs)
        (_, expected), expected_gradients = loss(plain)
    for x, y in zip((*result, *actual_gradients), (*expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "tiles", [1, 2, 3, 8, 100]
)  # 11 tokens: the last tile of 2, 3 and 8 is shorter
@pytest.mark.parametrize(
    "scaling", [LogitScaling(), LogitScaling(0.4), LogitScaling(0.8, 1.5)], ids=str
)
def test_any_number_of_tiles_gives_the_same(tiles, scaling):
    """Also a loss that is no sum of logp and entropy, and several tokens asked about at one place,
    one of them twice.
    """
    hidden, weight, a, b, _ = inputs()
    targets = jnp.asarray(np.random.default_rng(1).integers(0, V, (M, 3))).at[0].set(4)

    def loss(function):
        def of(hidden, weight):
            logp, entropy = function(hidden, weight, targets, 0.7, scaling, head.Tiling(tiles))
            return jnp.sum(a * jnp.square(logp.sum(-1) + b)) + jnp.sum(jnp.exp(logp)) + jnp.max(
                entropy
            ), (
                logp,
                entropy,
            )

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))(hidden, weight)

    with jax.default_matmul_precision("highest"):
        (_, result), actual_gradients = loss(head.logprobs)
        (_, expected), expected_gradients = loss(plain)
    for x, y in zip((*result, *actual_gradients), (*expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=1e-5)


def test_the_number_of_tiles_is_the_number_of_parts_of_the_vocabulary():
    """With a number of tiles that is set, no logits are kept."""
    shapes = jnp.ones((13, 8)), jnp.ones((32, 8)), jnp.zeros(13, int)

    def loss(*arrays):
        return head.logprobs(*arrays, 1.0, LogitScaling(), head.Tiling(4))[0].sum()

    text = jax.jit(jax.grad(loss)).lower(*shapes).as_text()
    assert "13x8xf32" in text and "13x32xf32" not in text and "4x13x8xf32" not in text


@pytest.mark.parametrize(
    "scaling, leaves_out", [(LogitScaling(), False), (LogitScaling(0.8, 1.5), True)], ids=str
)
def test_kept_logits_give_the_bits_of_logits_that_are_computed_again(
    scaling, leaves_out, monkeypatch, all_optimizations
):
    """Without a gradient the values have these bits, too."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(1499, 32)), jnp.float32)
    targets = jnp.asarray(rng.integers(100, 1499, (64, 2)))
    left_out = jnp.tile(jnp.arange(40), (64, 1)).at[::3].set(-1) if leaves_out else None

    def loss(hidden, weight):
        logp, entropy = head.logprobs(hidden, weight, targets, 0.7, scaling, left_out_MI=left_out)
        return jnp.sum(jnp.square(logp)) + jnp.sum(jnp.exp(entropy)), (logp, entropy)

    def run():
        step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        program = jax.jit(step).lower(hidden, weight)
        kept = "2x64x500xf32" in program.as_text()
        return kept, jax.tree.leaves(program.compile()(hidden, weight))

    tile_of(monkeypatch, 500, keeps=True)
    is_kept, expected = run()
    values = jax.tree.leaves(jax.jit(loss)(hidden, weight))
    for x, y in zip(values, expected, strict=False):
        np.testing.assert_array_equal(x, y)
    tile_of(monkeypatch, 500, keeps=False)
    is_again_kept, again = run()
    assert is_kept and not is_again_kept
    for x, y in zip(again, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_logits_are_kept_up_to_a_share_of_the_memory(monkeypatch):
    """Of the full GiB of a device, unless a size or a number of tiles is set."""
    monkeypatch.setattr(head, "total_memory", lambda devices: 3 * 2**30 + 2**29)
    limit = 3 * 2**26 // 4  # logits of 4 bytes
    assert head.Tiling().keeps(limit // 1000, 1000)
    assert not head.Tiling().keeps(limit // 1000 + 1, 1000)
    assert not head.Tiling(2).keeps(1, 1)
    for tiles in (None, 2):
        assert head.Tiling(tiles, kept_mib=1).keeps(2**10, 2**8)
        assert not head.Tiling(tiles, kept_mib=1).keeps(2**10 + 1, 2**8)
        assert not head.Tiling(tiles, kept_mib=0).keeps(1, 1)
    monkeypatch.setattr(head, "total_memory", lambda devices: None)
    assert not head.Tiling().keeps(1, 1)


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
def test_bfloat16_states_get_gradients_near_those_of_float32(keeps, monkeypatch):
    """Logits, sums and gradients before their last rounding are float32."""
    tile_of(monkeypatch, 100, keeps=keeps)
    rng = np.random.default_rng(5)
    hidden = jnp.asarray(rng.normal(size=(32, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(250, 16)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, 250, 32))

    def loss(function, hidden, weight):
        logp, entropy = function(hidden, weight, targets, 1.0)
        return jnp.sum(jnp.exp(logp)) + jnp.sum(entropy), logp

    step = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, logp), result = jax.jit(step(partial(loss, head.logprobs)))(hidden, weight)
    states, table = (a.astype(jnp.float32) for a in (hidden, weight))
    (_, exact), expected = jax.jit(step(partial(loss, plain)))(states, table)
    np.testing.assert_allclose(logp, exact, atol=1e-5)
    for x, y in zip(result, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(np.float32), y, atol=0.01 * np.abs(y).max())


LARGE = """
import jax, jax.numpy as jnp, numpy as np
from policy.heads import head
rng = np.random.default_rng(0)
M, E, V = 3, 16, 151_936
hidden, weight = rng.normal(size=(M, E)), rng.normal(size=(V, E))
targets, factor = rng.integers(0, V, M), rng.normal(size=(2, M))

def plain(hidden, weight, targets, temperature):
    log_p = jax.nn.log_softmax(hidden @ weight.T / temperature)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], entropy

def gradient(function, dtype):
    def loss(hidden, weight):
        logp, entropy = function(hidden, weight, targets, 0.7)
        return jnp.sum(factor[0] * logp + factor[1] * entropy)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return run(hidden.astype(dtype), weight.astype(dtype))

expected = gradient(plain, np.float64)
for share in (0.0, 1.0):
    head.KEPT_SHARE = share
    for x, y in zip(gradient(head.logprobs, np.float32), expected, strict=True):
        assert x.dtype == np.float32 and y.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * np.abs(y).max())
"""


def test_gradients_at_a_large_vocabulary_are_those_of_float64():
    done = subprocess.run(
        [sys.executable, "-c", LARGE],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("tiles", [None, 4])
def test_likeliest_tokens(tiles):
    hidden, weight, *_ = inputs()
    logp, ids = head.top_logprobs(
        hidden, weight, 3, 0.7, LogitScaling(0.8, 1.5), head.Tiling(tiles)
    )
    everything = np.stack(
        [plain(hidden, weight, jnp.full(M, v), 0.7, LogitScaling(0.8, 1.5))[0] for v in range(V)],
        axis=1,
    )
    np.testing.assert_array_equal(ids, np.argsort(-everything, axis=1, kind="stable")[:, :3])
    np.testing.assert_allclose(logp, -np.sort(-everything, axis=1)[:, :3], atol=2e-6)


@pytest.mark.parametrize("tiles", [None, 4])
def test_a_token_that_is_asked_for_has_the_float_of_the_likeliest(tiles):
    hidden, weight, *_ = inputs()
    how = 0.7, LogitScaling(0.8, 1.5), head.Tiling(tiles)
    _, ids = head.top_logprobs(hidden, weight, 3, *how)
    for targets in (ids[:, 0], ids[:, 2], jnp.arange(M) % V):
        top = head.top_and_rest(hidden, weight, 3, *how, targets_M=targets)
        expected, _ = head.logprobs(hidden, weight, targets, *how)
        np.testing.assert_allclose(top.target, expected, atol=2e-6)
        named = np.asarray(top.ids) == np.asarray(targets)[:, None]
        floats = np.where(named, top.logp, np.asarray(top.target)[:, None])
        np.testing.assert_array_equal(floats, np.asarray(top.target)[:, None].repeat(3, 1))


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_caps_its_logits_and_takes_its_tiles(tied):
    """Against plain differentiation through all logits of the full model: the tied table gets both
    gradients."""
    config = families.read(
        configuration(
            "Gemma2", num_hidden_layers=1, tie_word_embeddings=tied, final_logit_softcapping=2.0
        )
    )
    model = random_model(config)
    rows, weight = (
        jnp.asarray(tokens(2, 9)),
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32),
    )

    def gradient(tiles):
        graph = model.graph.with_runtime(num_vocab_tiling=tiles)

        def loss(params):
            logp, entropy, _ = graph.logprobs(params, rows, make_step(rows), 0.7)
            return jnp.sum(weight * logp[:, 1:] + jnp.sin(entropy[:, 1:]))

        return jax.jit(jax.grad(loss))(model.params)

    def reference(params):
        decoder = model.graph.decoder(params)
        hidden = decoder(rows, make_step(rows), None, model.graph.runtime)[0][:, :-1].reshape(
            16, -1
        )
        logp, entropy = plain(
            hidden, decoder.head_weight, rows[:, 1:].reshape(-1), 0.7, LogitScaling(softcap=2.0)
        )
        return jnp.sum(weight.reshape(-1) * logp + jnp.sin(entropy))

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(reference))(model.params)
    for path, result in gradient(5).items():
        np.testing.assert_allclose(
            result, expected[path], atol=1e-5 * (1 + np.abs(expected[path]).max()), err_msg=path
        )


@pytest.mark.slow
def test_devices_exchange_weights_and_no_logits():
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    }
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def on_four_devices(V, scaling, leaves_out, tiles, **degrees):
    """Rows, or the vocabulary, or both cut over four devices: the numbers of one device, no result
    of a collective is as large as the logits of a chunk, and a weight that is cut along E is on no
    device in full. tiles: None: chosen by size, with logits that are kept."""
    mesh, rng = layout(degrees), np.random.default_rng(0)
    hidden, weight = (
        rng.normal(size=(4, 16, 8)).astype(np.float32),
        rng.normal(size=(V, 8)).astype(np.float32),
    )
    targets, factor = (
        jnp.asarray(rng.integers(0, V, (64, 2))),
        rng.normal(size=64).astype(np.float32),
    )
    left_out = None
    if leaves_out:  # all ids of the first tiles, and one more
        targets = targets % (V - 20) + 20
        left_out = jnp.tile(jnp.asarray([*range(18), 19, -1]), (64, 1)).at[::3].set(-1)
    places = [
        mesh.sharding(axes, a.shape)
        for axes, a in ((("batch", None, None), hidden), (("vocab", "embed_vocab"), weight))
    ]

    def loss(hidden, weight, mesh=None):
        tiling = head.Tiling(tiles, mesh)
        logp, entropy = head.logprobs(
            hidden.reshape(-1, 8), weight, targets, 0.7, scaling, tiling, left_out
        )
        return jnp.sum(factor[:, None] * jnp.square(logp)) + jnp.sum(jnp.exp(entropy)), (
            logp,
            entropy,
        )

    step = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    program = jax.jit(step(partial(loss, mesh=mesh)), in_shardings=places)
    expected = jax.tree.leaves(jax.jit(step(loss))(hidden, weight))
    for x, y in zip(jax.tree.leaves(program(hidden, weight)), expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(x), np.asarray(y), rtol=1e-5, atol=3e-6 * np.abs(y).max()
        )
    text = program.lower(hidden, weight).compile().as_text()
    results = re.findall(
        r" = (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text
    )
    exchanged = [
        shape.split(",") for result in results for shape in re.findall(r"f32\[([\d,]*)\]", result)
    ]
    logits = [
        shape
        for shape in exchanged
        if {"48", "44", "24", "12"} & {*shape} and not {"8", "4", "2"} & {*shape}
    ]
    assert exchanged and not logits, exchanged
    if mesh.spec(("vocab", "embed_vocab"), weight.shape)[1]:
        assert not re.search(rf"f32\[{V},8\]", text), degrees


def test_a_tied_weight_gets_the_gradient_of_both_uses(monkeypatch):
    """The table is the embedding of the hidden states as well as the head."""
    tile_of(monkeypatch, 4, keeps=True)
    _, table, a, b, targets = inputs()
    tokens = jnp.arange(M) % V

    def loss(function, table):
        logp, entropy = function(jnp.tanh(table[tokens]), table, targets, 1.0)
        return jnp.sum(a * logp + b * entropy)

    result, expected = (
        jax.jit(jax.grad(partial(loss, function)))(table) for function in (head.logprobs, plain)
    )
    np.testing.assert_allclose(result, expected, atol=5e-6, rtol=1e-5)


def test_no_array_of_all_logits_is_made_where_none_is_kept(monkeypatch):
    """Not even in the backward pass: no intermediate of the program has M x V elements."""
    hidden, weight, targets = jnp.ones((64, 8)), jnp.ones((1024, 8)), jnp.zeros(64, int)

    def text(keeps):
        tile_of(monkeypatch, 128, keeps=keeps)
        loss = jax.grad(
            lambda h, w: sum(map(jnp.sum, head.logprobs(h, w, targets, 1.0))), argnums=(0, 1)
        )
        return jax.jit(loss).lower(hidden, weight).as_text()

    assert "64x128xf32" in text(False) and "64x1024xf32" not in text(False)
    assert "8x64x128xf32" in text(True) and "8x64x128xf32" not in text(False)


def test_a_compiled_gradient_holds_the_logits_that_it_keeps_and_an_estimate_counts_them(
    monkeypatch, all_optimizations
):
    """A plan compiles this program, and so counts them; `rl plan --search` estimates."""
    hidden, weight, targets = jnp.ones((64, 8)), jnp.ones((4096, 8)), jnp.zeros(64, int)
    logits = 4 * 64 * 4096

    def temporaries(keeps):
        tile_of(monkeypatch, 256, keeps=keeps)
        loss = jax.grad(lambda h, w: head.logprobs(h, w, targets, 1.0)[0].sum(), argnums=(0, 1))
        compiled = jax.jit(lambda *a: loss(*a)).lower(hidden, weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temporaries(True) - temporaries(False)
    assert 0.9 * logits < more < 1.2 * logits
    graph = random_model(families.read(configuration("Llama", num_hidden_layers=1))).graph
    own = 4 * 64 * graph.config.vocab_size
    tile_of(monkeypatch, 256, keeps=True)
    assert kept_logits(graph, 64.0) == own
    assert kept_logits(graph, 64.0, sides=2) == 2 * own  # with the logits of a teacher
    at_most = graph.with_runtime(kept_logits_mib=1)
    tokens = 2**18 // graph.config.vocab_size
    assert kept_logits(at_most, tokens) > 0 and kept_logits(at_most, tokens, sides=2) == 0
    assert kept_logits(graph.with_runtime(num_vocab_tiling=2), 64.0) == 0
    tile_of(monkeypatch, 256, keeps=False)
    assert kept_logits(graph, 64.0) == 0


def test_far_apart_logits_give_no_nan():
    hidden, weight = jnp.asarray([[1e4], [-1e4]]), jnp.asarray([[1.0], [-1.0], [0.0]])
    logp, entropy = head.logprobs(hidden, weight, jnp.asarray([0, 0]), 1.0)
    np.testing.assert_allclose(logp, [0.0, -2e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)
    gradient = jax.grad(
        lambda h: sum(map(jnp.sum, head.logprobs(h, weight, jnp.asarray([0, 0]), 1.0)))
    )(hidden)
    assert np.isfinite(gradient).all()


def test_logits_of_bfloat16_states_are_float32():
    hidden, weight = jnp.ones((2, 3, E), jnp.bfloat16), jnp.ones((V, E), jnp.float32)
    assert head.logits(hidden, weight).dtype == jnp.float32 and head.logits(
        hidden, weight
    ).shape == (2, 3, V)


if __name__ == "__main__":
    head.CHUNK_LOGITS = 300  # several tiles also by size
    head.LEAST_TOKENS = 16
    head.CPU_TILE_LOGITS = 1
    for degrees in ({"fsdp": 4}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2}):
        # 44: the last of three tiles is filled up
        for vocabulary, scaling in ((48, LogitScaling()), (44, LogitScaling(1.3, 1.5))):
            for leaves_out, tiles in ((False, 3), (True, 3), (True, None)):
                on_four_devices(vocabulary, scaling, leaves_out, tiles, **degrees)
