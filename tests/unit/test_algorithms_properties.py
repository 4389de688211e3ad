"""Loss, gradient and metrics do not depend on how a batch is split, packed or padded."""

import dataclasses
import itertools
from typing import get_args

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rl.algorithms
from rl.algorithms import _policy_gradient

ROWS, WIDTH = 6, 5
PER_TOKEN = (
    "logp",
    "old_logp",
    "sampler_logp",
    "ref_logp",
    "entropy",
    "advantages",
    "correct",
    "divergence",
    "features",
)
# Together every aggregation, correction and rejection.
OPTIONS = [
    {
        "aggregation": "token",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "rejection": "token_k2",
        "rejection_max": 0.02,
    },
    {
        "aggregation": "sequence",
        "kl_coef": 0.1,
        "kl": "unbiased",
        "rejection": "sequence_max_ratio",
        "rejection_max": 1.3,
    },
    {
        "aggregation": "sequence_sum",
        "correction": "token_truncate",
        "correction_max": 1.1,
        "correction_normalize": True,
    },
    {
        "aggregation": "constant",
        "correction": "sequence_mask",
        "rejection": "sequence_mean_k3",
        "rejection_max": 0.03,
    },
    {
        "aggregation": "prompt",
        "correction": "geometric_mask",
        "correction_min": 0.9,
        "correction_normalize": True,
    },
    {"aggregation": "prompt", "kl_coef": 0.2, "kl": "k2", "count_empty_sequences": False},
    {
        "aggregation": "token",
        "top_entropy": 0.4,
        "correction": "sequence_truncate",
        "off_policy_delta": 0.1,
    },
    {
        "aggregation": "sequence",
        "count_empty_sequences": False,
        "correction": "token_mask",
        "correction_max": 1.1,
    },
    {
        "aggregation": "token",
        "rejection": "token_k3",
        "rejection_max": 0.02,
        "rejection_changes_denominator": True,
    },
    {
        "aggregation": "sequence",
        "rejection": "sequence_sum_k2",
        "rejection_max": 0.1,
        "rejection_changes_denominator": True,
    },
    {"aggregation": "prompt", "rejection": "sequence_sum_k3", "rejection_max": 0.1},
    {"aggregation": "constant", "rejection": "sequence_mean_k2", "rejection_max": 0.03},
    {"aggregation": "sequence_sum", "rejection": "sequence_max_k2", "rejection_max": 0.1},
    {
        "aggregation": "token",
        "correction": "token_mask",
        "rejection": "sequence_max_k3",
        "rejection_max": 0.1,
    }
    | {"rejection_changes_denominator": True, "correction_normalize": True},
]
OF_CLIPPED = [
    {"delta": 1.5},
    {"ratio": "sequence_token"},
    {"dual_clip": 2.0},
    {"ratio": "sequence"},
    {"ratio": "sequence_sum"},
]
SEEDS = st.integers(0, 2**31)


def cases():
    """(algorithm, options): every algorithm but those of pairs with its defaults, and with some
    that go with any."""
    known = [
        name
        for name in rl.algorithms.known()
        if rl.algorithms.get(name).stage in ("online", "supervised")
    ]
    result = [(name, {}) for name in known] + [
        ("ppo", {"positive_nll_coef": 0.2, "aggregation": "sequence"})
    ]
    some, of_clipped = itertools.cycle(OPTIONS), itertools.cycle(OF_CLIPPED)
    for name in known:
        algorithm = rl.algorithms.get(name)
        if hasattr(algorithm, "aggregation") and hasattr(algorithm, "rejection"):
            options = (
                OPTIONS[3] if algorithm.per_token_applies_correction else next(some)
            )  # such a correction takes no mean
            result.append(
                (
                    name,
                    options
                    | {"old_logp": "trainer"}
                    | (next(of_clipped) if hasattr(algorithm, "dual_clip") else {}),
                )
            )
    return result


def test_the_options_of_the_cases_are_all_that_there_are():
    given = [options for _, options in cases()]
    aggregations = rl.algorithms.get("grpo").__pydantic_fields__["aggregation"].annotation
    assert {options["aggregation"] for options in given if options} == set(get_args(aggregations))
    for key, kind in (
        ("correction", _policy_gradient.Correction),
        ("rejection", _policy_gradient.Rejection),
    ):
        assert {options.get(key) for options in given} == {None, *get_args(kind)}


def random_batch(seed, garbage=np.nan):
    """Rows of 0 to WIDTH tokens, some in between masked, in three groups; garbage where the mask is
    0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, WIDTH + 1, ROWS)
    mask = (np.arange(WIDTH) < lengths[:, None]) & (rng.random((ROWS, WIDTH)) < 0.85)
    mask[0, 0] = True
    old = -rng.exponential(1.0, (ROWS, WIDTH))
    arrays = {name: old + rng.normal(0, 0.2, old.shape) for name in PER_TOKEN}
    arrays["entropy"] = rng.exponential(1.0, old.shape)
    arrays["advantages"] = np.broadcast_to(rng.normal(size=(ROWS, 1)), old.shape)
    arrays = {
        name: np.where(mask, values, garbage).astype(np.float32) for name, values in arrays.items()
    }
    arrays["correct"] = np.where(mask, np.array([[1], [0], [1], [0], [0], [1]]), garbage).astype(
        np.float32
    )
    prompt = np.array([3, 3, 8, 8, 8, 5], np.int32)
    return rl.algorithms.PolicyInputs(
        mask=mask.astype(np.float32), prompt=prompt, max_length=WIDTH + 2, **arrays
    )


def packed(batch, garbage):
    """Two sequences in a row of 2 * WIDTH + 1, the last token of it padding."""

    def spread(array, padding):
        pairs = np.asarray(array).reshape(ROWS // 2, 2 * WIDTH)
        return np.concatenate([pairs, np.full((ROWS // 2, 1), padding, pairs.dtype)], axis=1)

    segments = np.broadcast_to(np.repeat([1, 2], WIDTH), (ROWS // 2, 2 * WIDTH))
    tokens = {name: spread(getattr(batch, name), garbage) for name in PER_TOKEN}
    prompt = spread(np.repeat(batch.prompt, WIDTH), -1)
    return dataclasses.replace(
        batch, mask=spread(batch.mask, 0), segments=spread(segments, 0), prompt=prompt, **tokens
    )


def run(algorithm, batch):
    """Loss, metrics, and the gradients by logp, entropy and divergence."""

    def loss(logp, entropy, divergence):
        changes = {"logp": logp, "entropy": entropy, "divergence": divergence}
        return algorithm.loss(dataclasses.replace(batch, **changes))

    gradients_of = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (value, metrics), gradients = gradients_of(batch.logp, batch.entropy, batch.divergence)
    return value, metrics, gradients


def rows_of(batch):
    """Each row as a micro-batch, stacked; totals are repeated."""
    rows = len(batch.mask)
    return jax.tree.map(
        lambda array: array[:, None] if np.ndim(array) else np.repeat(array, rows), batch
    )


def assert_same(actual, expected, name=""):
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name, options, marks=() if not options or name in ("grpo", "gmpo") else pytest.mark.slow
        )
        for name, options in cases()
    ],
    ids=str,
)
def test_micro_batches_of_packed_rows_add_up_to_the_batch_of_separate_rows(name, options):
    """Also where other garbage stands outside the mask, and some rows hold no token."""
    algorithm = rl.algorithms.get(name, **options)
    seed = sum(map(ord, f"{name}{options}"))
    loss, metrics, gradients = run(algorithm, random_batch(seed))
    batch = algorithm.with_totals(packed(random_batch(seed, np.inf), -1e30))
    losses, stacked, parts = jax.vmap(lambda part: run(algorithm, part))(rows_of(batch))
    assert np.isfinite(loss) and (options or any(map(np.any, gradients)))
    assert_same(losses.sum(), loss)
    for part, gradient in zip(parts, gradients, strict=True):
        assert_same(part[:, 0, :-1].reshape(ROWS, WIDTH), gradient)
        assert not part[:, 0, -1].any()
    for key, value in rl.algorithms.reduce_metrics(jax.tree.map(np.asarray, stacked)).items():
        assert_same(value, metrics[key], key)


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
    assert not any(map(np.any, gradients))
    assert all(np.isfinite(value) for value in metrics.values())
