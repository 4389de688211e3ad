"""Weights prepared for decoding: the same products, and the same decoder, as the policy's own
arrays give."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import configuration, random_model

import policy
from policy import families, modes
from policy.cache import cache as caches
from policy.config import LogitScaling, Runtime
from policy.execution.decoding import DecodingWeights, Repeats, prepare_for_decoding
from policy.heads import head
from policy.mesh.sharding import Layout, layout
from policy.ops import projection
from policy.ops.linear import linear
from policy.ops.projection import DecodingMatrices, Projection
from rollout.engine.programs import DecoderPrograms
from rollout.types import GeneratorOptions


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Every weight counts as small, or as large."""
    monkeypatch.setattr(projection, "LARGE", 1 << 30 if request.param == "small" else 1)
    return request.param


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def projections(inputs: int, *weights: jax.Array) -> list[Projection]:
    return list(
        DecodingMatrices.of(dict(zip("abc", weights, strict=False)), inputs).projections().values()
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_products_with_prepared_weights_are_those_with_the_weights(size, rows):
    x, q, k = numbers(rows, 1, 6), numbers(6, 4, 5), numbers(6, 2, 5)
    joined = projections(1, q, k)
    assert all(a.transposed == (size == "large") for a in joined)
    assert (joined[0].matrix is joined[1].matrix) == (size == "small")
    for weight, each in zip((q, k), joined, strict=True):
        expected = np.einsum("bte,ehd->bhtd", x, weight)
        np.testing.assert_allclose(
            linear("bte,ehd->bhtd", x, each, Runtime()), expected, rtol=1e-5, atol=1e-5
        )


def test_a_product_over_two_dimensions_and_over_leading_ones_that_only_x_has(size):
    x, out, up = numbers(2, 4, 3, 5), numbers(4, 5, 6), numbers(5, 7)
    result = linear("bhtd,hde->bte", x, projections(2, out)[0], Runtime())
    np.testing.assert_allclose(result, np.einsum("bhtd,hde->bte", x, out), rtol=1e-5, atol=1e-5)
    result = linear("...e,ei->...i", x, projections(1, up)[0], Runtime())
    np.testing.assert_allclose(result, np.einsum("abce,ei->abci", x, up), rtol=1e-5, atol=1e-5)


def test_a_prepared_head_is_also_a_table():
    table, hidden = numbers(9, 4), numbers(2, 3, 4)
    sharded = Projection(table, transposed=True, start=0, inputs=(4,), outputs=(9,))
    capped = LogitScaling(0.5, 2.0)
    np.testing.assert_allclose(
        head.logits(hidden, sharded, capped),
        head.logits(hidden, table, capped),
        rtol=1e-5,
        atol=1e-5,
    )
    assert sharded[...] is sharded
    np.testing.assert_array_equal(sharded[jnp.asarray([[3, 1]])], table[jnp.asarray([[3, 1]])])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("Qwen3", 1),
        ("Qwen3", 2),
        ("DeepseekV3", 2),
        pytest.param("Qwen3Next", 2, marks=pytest.mark.slow),
    ],
)
def test_one_step_of_a_decoder_is_the_same(size, name, rows):
    """Of attention, of latent attention with experts, and of the gated delta net."""
    model = random_model(families.read(configuration(name)), seed=1)
    tokens, lengths = jnp.arange(rows) + 3, jnp.arange(rows)
    cache = caches.create(model.config, rows, 4, "float32", scan=False)

    def step(params):
        decoder = model.graph.decoder(params)
        one = modes.next_token_step(lengths, jnp.ones(rows, bool))
        states, updated = modes.next_token_states(decoder, tokens, one, cache, model.graph.runtime)
        return modes.logits(decoder, states, model.graph.runtime), updated

    prepare = partial(prepare_for_decoding, model.graph)
    expected = jax.tree.leaves(jax.jit(step)(model.params))
    copies = DecodingWeights(model.graph)
    for params in (
        model.params,
        copies.prepare(model.params),
    ):  # copied in the program, and before it
        result = jax.jit(lambda params: step(prepare(params)))(params)
        for a, b in zip(jax.tree.leaves(result), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3"])
def test_copies_of_a_bfloat16_decoder_are_rounded_once_and_give_the_same_bits(name, monkeypatch):
    """As on one GPU. Norms and routers, which are computed in float32, stay as they are."""
    monkeypatch.setattr(Layout, "platform", "gpu")
    model = random_model(families.read(configuration(name)), seed=1)
    graph = model.graph.with_runtime(dtype="bfloat16")
    tokens, lengths = jnp.arange(2) + 3, jnp.arange(2)
    cache = caches.create(model.config, 2, 4, "bfloat16", scan=False)

    @jax.jit
    def step(params):
        one = modes.next_token_step(lengths, jnp.ones(2, bool))
        decoder = graph.decoder(prepare_for_decoding(graph, params))
        states, updated = modes.next_token_states(decoder, tokens, one, cache, graph.runtime)
        return modes.logits(decoder, states, graph.runtime), updated

    copies = DecodingWeights(graph).prepare(model.params)
    for path, repeats in copies.items():
        if isinstance(repeats, tuple):
            rounded = jnp.bfloat16 if path in graph.inputs else jnp.float32
            assert {each.dtype for each in repeats} == {jnp.dtype(rounded)}, path
    for a, b in zip(
        jax.tree.leaves(step(copies)), jax.tree.leaves(step(model.params)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("platform", "unrolled"), [("gpu", True), ("tpu", False)])
def test_decoding_is_unrolled_on_one_gpu(platform, unrolled, monkeypatch):
    mesh = layout({"fsdp": 1}, devices=jax.devices()[:1])
    model = policy.create("tiny-deepseek", mesh=mesh)
    monkeypatch.setattr(Layout, "platform", platform)
    programs = DecoderPrograms(model.graph, GeneratorOptions(), slots=2, max_length=8)
    assert programs.scan is not unrolled and programs.reads_copies is unrolled


def test_copies_are_made_once_for_the_same_weights_and_released():
    model = policy.create("tiny-deepseek")
    copies = DecodingWeights(model.graph)
    first = copies.prepare(model.params)
    arrays = jax.tree.leaves(first)
    assert all(
        a is b
        for a, b in zip(arrays, jax.tree.leaves(copies.prepare(dict(model.params))), strict=True)
    )
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), copies.abstract(model.params))
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), first)
    path = next(path for path, weight in first.items() if isinstance(weight, tuple))
    changed = model.params | {path: model.params[path] + np.float32(1)}
    a, b = (jax.tree.leaves(each[path][0])[0] for each in (first, copies.prepare(changed)))
    assert not np.array_equal(a, b)
    copies.release()
    assert copies.prepare(changed)[path][0] is not first[path][0]


def test_what_is_stored_as_a_matrix_and_what_is_only_sharded():
    model = policy.create("tiny-deepseek")
    seen = {}

    def look(graph):
        jax.eval_shape(
            lambda params: seen.update(prepare_for_decoding(graph, params)) or 0, model.params
        )
        return {
            path.rpartition(".")[2]: type(a[0])
            for path, a in seen.items()
            if isinstance(a, Repeats)
        }

    kinds = look(model.graph)
    assert (
        kinds["o_proj"] is kinds["q_b_proj"] is Projection and kinds["kv_b_proj"] is not Projection
    )
    assert isinstance(seen["lm_head"], Projection)
    bfloat16 = model.graph.with_runtime(dtype="bfloat16")
    assert Projection not in look(bfloat16).values() and dataclasses.is_dataclass(Projection)
