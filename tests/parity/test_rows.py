"""Padding, packing, positions, log-probabilities and the ways to compute a row: what surrounds the
logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import (
    STANDARD,
    VOCAB,
    configuration,
    random_model,
    reference_logits,
    tokens,
    torch_logprobs,
)

import policy
from policy import families
from policy.config import Runtime
from policy.modes import make_step

# Two sharing nothing: grouped heads with a window, and latent attention with experts.
KINDS = {
    "Qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "DeepseekV3": STANDARD["DeepseekV3"],
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    config = families.read(configuration(request.param, **KINDS[request.param]))
    return random_model(config, seed=3)


def with_runtime(model, **changes):
    """The same weights, computed another way."""
    runtime = dataclasses.replace(model.graph.runtime, **changes)
    return policy.Model(type(model.graph)(model.config, runtime, model.graph.layout), model.params)


def training_pass(model, row, segments, temperature):
    """(logp, entropy) as an update computes them, of the rows as they are; `model.logprobs` takes
    them apart."""
    step = make_step(row, segments=segments)
    return jax.jit(model.graph.logprobs)(model.params, row, step, np.float32(temperature))[:2]


def packed(lengths, width, padding_first=False):
    """(tokens, segments) [1, width] of documents of these lengths one after the other, and the
    documents."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, VOCAB, n) for n in lengths]
    row, segments = np.zeros((1, width), int), np.zeros((1, width), int)
    at = width - sum(lengths) if padding_first else 0
    for number, document in enumerate(documents, 1):
        row[0, at : at + len(document)], segments[0, at : at + len(document)] = document, number
        at += len(document)
    return row, segments, documents


@pytest.mark.parametrize("padding_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_documents_equal_the_documents_alone(model, padding_first):
    row, segments, documents = packed((9, 1, 14), 30, padding_first)
    logits = np.asarray(model.logits(row, segments=segments))
    logp, entropy = map(np.asarray, training_pass(model, row, segments, 0.7))
    for number, document in enumerate(documents, 1):
        alone, fill = np.zeros((1, 30), int), np.zeros((1, 30), int)
        alone[0, : len(document)], fill[0, : len(document)] = document, 1
        here = segments[0] == number
        n = len(document)
        expected = np.asarray(model.logits(alone, segments=fill))[0, :n]
        np.testing.assert_allclose(logits[0, here], expected, atol=1e-5, rtol=0)
        for result, want in zip(
            (logp, entropy), training_pass(model, alone, fill, 0.7), strict=True
        ):
            np.testing.assert_allclose(result[0, here], np.asarray(want)[0, :n], atol=1e-5, rtol=0)
            assert result[0, here][0] == 0.0
    for result in (logp, entropy):
        assert np.isfinite(result).all()
        assert not result[segments == 0].any()


def test_a_batch_of_one_equals_its_row_in_a_batch(model):
    rows = tokens(3, 30, seed=2)
    np.testing.assert_allclose(
        np.asarray(model.logits(rows[1:2]))[0], np.asarray(model.logits(rows))[1], atol=1e-5, rtol=0
    )


def test_positions_given_are_used(model):
    """Only distances count, up to rounding: shifted positions change nothing, stretched ones do."""
    rows = tokens(2, 30, seed=2)
    plain = np.asarray(model.logits(rows))
    positions = np.broadcast_to(np.arange(30), (2, 30))
    np.testing.assert_array_equal(np.asarray(model.logits(rows, positions=positions)), plain)
    np.testing.assert_allclose(
        np.asarray(model.logits(rows, positions=positions + 17)), plain, atol=2e-4, rtol=0
    )
    assert np.abs(np.asarray(model.logits(rows, positions=positions * 3)) - plain).max() > 0.1


def test_wrong_shapes_are_refused_by_name(model):
    with pytest.raises(ValueError, match=r"tokens must be \[rows, length\]"):
        model.logits(np.zeros(5, int))
    with pytest.raises(ValueError, match="segments must have the shape of tokens"):
        model.logits(np.zeros((2, 5), int), segments=np.ones((2, 4), int))


@pytest.mark.parametrize(
    "changes", [{"attention_chunk": 8}, {"scan": False}, {"remat": "none"}], ids=str
)
def test_another_way_to_compute_gives_the_same_logits(model, changes):
    row, segments, _ = packed((9, 1, 14), 30)
    expected = np.asarray(model.logits(row, segments=segments))[segments != 0]
    result = np.asarray(with_runtime(model, **changes).logits(row, segments=segments))[
        segments != 0
    ]
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=0)


def gradients(model, row, segments):
    """d(sum of weighted log-probabilities and entropies) / d(weights)."""
    rng = np.random.default_rng(5)
    a, b = (jnp.asarray(rng.normal(size=row.shape), jnp.float32) for _ in range(2))

    def loss(params):
        logp, entropy, _ = model.graph.logprobs(params, row, make_step(row, None, segments), 0.7)
        return jnp.sum(a * logp + b * entropy)

    return jax.jit(jax.grad(loss))(model.params)


def assert_same_gradients(actual, expected, tolerance):
    for path, want in expected.items():
        scale = np.abs(want).max() + 1e-6
        np.testing.assert_allclose(
            np.asarray(actual[path]) / scale,
            np.asarray(want) / scale,
            atol=tolerance,
            rtol=0,
            err_msg=path,
        )


WAYS = [
    {"attention_chunk": 8},
    {"scan": False},
    {"remat": "full"},
    {"remat": "minimal"},
    {"remat": "save_dot_except_mlp"},
    {"remat": "save_qkv_proj"},
    {"remat": "save_out_proj"},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_compute_gives_the_same_gradients(kind):
    model = random_model(families.read(configuration(kind, **KINDS[kind])), seed=3)
    row, segments, _ = packed((9, 1, 14), 30)
    row, segments = jnp.asarray(row), jnp.asarray(segments)
    expected = gradients(with_runtime(model, remat="none"), row, segments)
    assert all(np.isfinite(g).all() for g in expected.values())
    for changes in WAYS:
        result = gradients(with_runtime(model, **changes), row, segments)
        assert_same_gradients(result, expected, 2e-5)


@pytest.mark.slow
def test_remat_and_chunks_keep_the_gradients():
    config = families.read(configuration("Qwen3Moe", num_hidden_layers=2))
    model = random_model(config, runtime=Runtime(remat="none"))
    row, segments, _ = packed((5, 9), 16)
    row, segments = jnp.asarray(row), jnp.asarray(segments)
    expected = gradients(model, row, segments)
    result = gradients(with_runtime(model, remat="minimal", attention_chunk=8), row, segments)
    assert_same_gradients(result, expected, 2e-5)


# From here on the oracle is transformers.


@pytest.mark.parametrize("kind", oracles.by_kind(always=KINDS))
def test_left_padding_and_log_probabilities_equal_those_of_transformers(kind, pair):
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    theirs, ours = (result := pair(kind, oracles.KINDS[kind].padded)).theirs, result.ours
    row = tokens(2, 70, seed=4)
    mask = np.ones((2, 70), int)
    mask[0, :5] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    expected = reference_logits(
        theirs, row, attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions)
    )
    result = np.asarray(ours.logits(row, segments=mask))
    tolerance = oracles.KINDS[kind].logits
    np.testing.assert_allclose(result[mask != 0], expected[mask != 0], atol=tolerance, rtol=0)
    for temperature in (1.0, 0.7):
        requested = torch_logprobs(torch.tensor(expected), row, temperature)
        scored = (mask[:, :-1] != 0) & (mask[:, 1:] != 0)
        for result in (
            ours.logprobs(row, segments=mask, temperature=temperature),
            training_pass(ours, row, mask, temperature),
        ):
            for a, want in zip(map(np.asarray, result), requested, strict=True):
                np.testing.assert_allclose(
                    a[:, 1:][scored], want.numpy()[scored], atol=tolerance, rtol=0
                )
                assert not a[:, 1:][~scored].any() and not a[:, 0].any()
