"""Loss, gradient and metrics do not depend on how a batch is split, packed or padded."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rl.algorithms

ROWS, WIDTH = 6, 5
PER_TOKEN = ("logp", "old_logp", "sampler_logp", "ref_logp", "entropy")
OPTIONS = [
    {"kl_coef": 0.1, "entropy_coef": 0.05},
    {"aggregation": "sequence", "kl_coef": 0.1, "kl": "unbiased", "delta": 1.5},
    {"aggregation": "sequence_sum", "ratio": "sequence_token", "correction": "token_truncate"},
    {"aggregation": "constant", "correction": "sequence_mask", "dual_clip": 2.0},
    {"aggregation": "prompt", "ratio": "sequence", "correction": "geometric_mask", "correction_min": 0.9},
    {"aggregation": "prompt", "kl_coef": 0.2, "kl": "k2", "count_empty_sequences": False},
    {"top_entropy": 0.4, "correction": "sequence_truncate", "off_policy_delta": 0.1},
    {"aggregation": "sequence", "count_empty_sequences": False, "correction": "token_mask"},
]
SEEDS = st.integers(0, 2**31)


def random_batch(seed, garbage=np.nan):
    """Rows of 0 to WIDTH tokens, some in between masked, in three groups; garbage where the mask is 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, WIDTH + 1, ROWS)
    mask = (np.arange(WIDTH) < lengths[:, None]) & (rng.random((ROWS, WIDTH)) < 0.85)
    mask[0, 0] = True
    old = -rng.exponential(1.0, (ROWS, WIDTH))
    arrays = {name: old + rng.normal(0, 0.2, old.shape) for name in PER_TOKEN}
    arrays["entropy"] = rng.exponential(1.0, old.shape)
    arrays["advantages"] = np.broadcast_to(rng.normal(size=(ROWS, 1)), old.shape)
    arrays = {name: np.where(mask, values, garbage).astype(np.float32) for name, values in arrays.items()}
    prompt = np.array([3, 3, 8, 8, 8, 5], np.int32)
    return rl.algorithms.PolicyInputs(mask=mask.astype(np.float32), prompt=prompt, max_length=WIDTH + 2, **arrays)


def run(algorithm, batch):
    """Loss, metrics, and the gradients by logp and entropy."""

    def loss(logp, entropy):
        return algorithm.loss(dataclasses.replace(batch, logp=logp, entropy=entropy))

    (value, metrics), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(batch.logp, batch.entropy)
    return value, metrics, [np.asarray(gradient) for gradient in gradients]


def cut(batch, rows):
    return jax.tree.map(lambda array: array[rows] if np.ndim(array) else array, batch)


def assert_same(actual, expected, name=""):
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, size=st.sampled_from([1, 4]))
def test_micro_batches_add_up_to_the_batch(options, seed, size):
    algorithm = rl.algorithms.get("grpo", **options)
    loss, metrics, gradients = run(algorithm, random_batch(seed))
    batch = algorithm.with_totals(random_batch(seed))
    parts = [run(algorithm, cut(batch, slice(start, start + size))) for start in range(0, ROWS, size)]
    assert_same(sum(part[0] for part in parts), loss)
    for index, gradient in enumerate(gradients):
        assert_same(np.concatenate([part[2][index] for part in parts]), gradient)
    stacked = {key: np.stack([part[1][key] for part in parts]) for key in metrics}
    for key, value in rl.algorithms.reduce_metrics(stacked).items():
        assert_same(value, metrics[key], key)


def packed(batch):
    """Two sequences in a row of 2 * WIDTH + 1, the last token of it padding."""

    def lay_out(array, padding):
        pairs = np.asarray(array).reshape(ROWS // 2, 2 * WIDTH)
        return np.concatenate([pairs, np.full((ROWS // 2, 1), padding, pairs.dtype)], axis=1)

    segments = np.broadcast_to(np.repeat([1, 2], WIDTH), (ROWS // 2, 2 * WIDTH))
    tokens = {name: lay_out(getattr(batch, name), np.nan) for name in (*PER_TOKEN, "advantages")}
    if batch.prompt_tokens is not None:
        tokens["prompt_tokens"] = lay_out(np.repeat(np.asarray(batch.prompt_tokens), WIDTH), np.nan)
    return dataclasses.replace(batch, mask=lay_out(batch.mask, 0), segments=lay_out(segments, 0), prompt=None, **tokens)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_packed_rows_give_the_same_numbers(options, seed):
    algorithm = rl.algorithms.get("grpo", **options)
    batch = random_batch(seed)
    loss, metrics, gradients = run(algorithm, batch)
    if options.get("aggregation") == "prompt":
        batch = algorithm.with_totals(batch)
    packed_loss, packed_metrics, packed_gradients = run(algorithm, packed(batch))
    assert_same(packed_loss, loss)
    for gradient, other in zip(gradients, packed_gradients, strict=True):
        assert_same(other[:, :-1].reshape(ROWS, WIDTH), gradient)
        assert not other[:, -1].any()
    for key, value in metrics.items():
        assert_same(packed_metrics[key], value, key)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, garbage=st.sampled_from([np.nan, np.inf, -np.inf, -1e30]))
def test_what_stands_in_padding_changes_nothing(options, seed, garbage):
    algorithm = rl.algorithms.get("grpo", **options)
    clean, dirty = (jax.tree.leaves(run(algorithm, random_batch(seed, filler))) for filler in (0.0, garbage))
    for one, other in zip(clean, dirty, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one, other)


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=4),
    size=st.integers(1, 9),
    scale=st.sampled_from(["group", "batch", "none", "others"]),
)
def test_groups_of_equal_rewards_have_no_advantage(rewards, size, scale):
    table = np.repeat(np.array(rewards)[:, None], size, axis=1)
    assert not rl.algorithms.get("grpo", scale=scale, std_eps=1e-6).advantages(table).any()


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, scale=st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_add_up_to_zero_and_are_finite(seed, scale):
    rng = np.random.default_rng(seed)
    rewards = np.where(rng.random((5, 8)) < 0.2, np.nan, rng.integers(0, 3, (5, 8)) / 3)
    advantages = rl.algorithms.get("grpo", scale=scale).advantages(rewards)
    assert np.isfinite(advantages).all()
    assert not advantages[np.isnan(rewards)].any()
    np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-12)


def test_an_empty_micro_batch_adds_nothing():
    algorithm = rl.algorithms.get("grpo", **OPTIONS[0])
    batch = random_batch(0)
    empty = dataclasses.replace(batch, mask=np.zeros_like(batch.mask), num_tokens=np.float32(9.0))
    loss, metrics, gradients = run(algorithm, empty)
    assert loss == 0
    assert not np.any(gradients)
    assert all(np.isfinite(value) for value in metrics.values())
