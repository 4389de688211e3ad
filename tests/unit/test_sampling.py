"""Which tokens filters leave, and how often each is drawn. The oracles are plain numpy, and the
processors of transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy.ops.seeds import checked_seed
from rollout import SamplingParams
from rollout.engine.sampling import Draws, choose, draw, filter_mask, uniforms

DRAWS = 40_000
# (top_k, top_p, min_p): each alone, all pairs, all three, and the ones that keep everything.
FILTERS = [
    (0, 1.0, 0.0),
    (3, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.3),
    (5, 0.8, 0.0),
    (4, 1.0, 0.2),
    (0, 0.9, 0.1),
    (6, 0.9, 0.15),
    (1, 1.0, 0.0),
    (100, 1.0, 0.0),
    (0, 1e-9, 0.0),
    (0, 1.0, 1.0),
]


@jax.jit
def keep_jit(logits, top_k, top_p, min_p):
    """The same filters for every row."""
    return filter_mask(
        logits, *(jnp.full((len(logits), 1), value) for value in (top_k, top_p, min_p))
    )


@jax.jit
def draw_jit(logits, uniforms, filters):
    return draw(
        logits if filters is None else jnp.where(keep_jit(logits, *filters), logits, -jnp.inf),
        uniforms,
    )


def as_arrays(filters):
    return tuple(
        np.asarray(value, kind)
        for value, kind in zip(filters, (np.int32, np.float32, np.float32), strict=True)
    )


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def expected_keep(logits, top_k, top_p, min_p):
    """One row, token by token: top-k, then top-p of what is left, then min-p of what is left. No
    ties."""
    order = [int(i) for i in np.argsort(-logits)]
    left = order[:top_k] if top_k else order
    kept, mass = [], 0.0
    for token, p in zip(left, softmax(logits[left].astype(np.float64)), strict=True):
        if mass >= top_p and top_p < 1:
            break
        kept.append(token)
        mass += p
    p = softmax(logits[kept].astype(np.float64))
    return {
        token
        for token, own in zip(kept, p, strict=True)
        if own >= min_p * p.max() or own == p.max()
    }


def kept_of(logits, filters):
    mask = np.asarray(keep_jit(jnp.asarray(logits, jnp.float32), *as_arrays(filters)))
    return [set(np.flatnonzero(row).tolist()) for row in mask]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_leave_what_plain_numpy_leaves(filters):
    logits = np.random.default_rng(0).normal(0, 2, (200, 12)).astype(np.float32)
    assert kept_of(logits, filters) == [expected_keep(row, *filters) for row in logits]


def test_top_p_is_of_what_top_k_left():
    """0.4 of the two kept is 0.571 of their sum: alone enough for 0.55, but not where top-p comes
    first."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    assert kept_of(logits, (2, 0.55, 0.0)) == [{0}]
    assert kept_of(logits, (0, 0.55, 0.0)) == [{0, 1}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_equal_those_of_transformers(filters):
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    from transformers.generation import logits_process as hf

    top_k, top_p, min_p = filters
    logits = np.random.default_rng(1).normal(0, 2, (200, 12)).astype(np.float32)
    scores = torch.tensor(logits)
    for expected, processor in (
        (top_k, hf.TopKLogitsWarper),
        (top_p if top_p < 1 else 0, hf.TopPLogitsWarper),
        (min_p, hf.MinPLogitsWarper),
    ):
        if expected:
            scores = processor(expected)(None, scores)
    assert kept_of(logits, filters) == [
        set(np.flatnonzero(np.isfinite(row)).tolist()) for row in scores.numpy()
    ]


def test_tokens_as_likely_as_the_last_kept_one_are_kept():
    logits = np.array([[1.0, 3.0, 1.0, 3.0, 0.0]])
    assert kept_of(logits, (1, 1.0, 0.0)) == [{1, 3}]
    assert kept_of(logits, (3, 1.0, 0.0)) == [{0, 1, 2, 3}]
    assert kept_of(logits, (0, 1e-9, 0.0)) == [{1, 3}]
    assert kept_of(logits, (0, 1.0, 1.0)) == [{1, 3}]


def test_top_p_1_keeps_the_tail_of_a_large_vocabulary():
    """The float32 sum of these passes 1 long before the last token."""
    logits = np.random.default_rng(2).normal(0, 3, (4, 50_000)).astype(np.float32)
    assert [len(kept) for kept in kept_of(logits, (0, 1.0, 0.0))] == [50_000] * 4


def chi_square(counts, probabilities):
    """p-value that `counts` were drawn from `probabilities`; tokens of probability 0 must not
    occur."""
    from scipy.stats import chisquare

    assert not counts[probabilities == 0].any()
    some = probabilities > 0
    return (
        chisquare(counts[some], probabilities[some] * counts.sum()).pvalue
        if some.sum() > 1
        else 1.0
    )


def counts_of(logits, filters, temperature=1.0, draws=DRAWS):
    ids = jnp.arange(draws, dtype=jnp.int32)
    u = uniforms(jnp.uint32(3), ids, jnp.zeros_like(ids), jnp.full_like(ids, 7))
    rows = jnp.broadcast_to(jnp.asarray(logits / temperature, jnp.float32), (draws, len(logits)))
    return np.bincount(
        np.asarray(draw_jit(rows, u, as_arrays(filters) if filters else None)),
        minlength=len(logits),
    )


LOGITS = np.log(np.array([0.05, 0.3, 0.02, 0.18, 0.1, 0.25, 0.04, 0.06]))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize(
    "filters", [None, (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.3), (6, 0.85, 0.25)], ids=str
)
def test_tokens_are_drawn_as_often_as_their_probability_says(filters, temperature):
    kept = expected_keep(LOGITS / temperature, *(filters or (0, 1.0, 0.0)))
    exact = softmax(np.where([token in kept for token in range(8)], LOGITS / temperature, -np.inf))
    counts = counts_of(LOGITS, filters, temperature)
    assert chi_square(counts, exact) > 1e-4
    # As large a test tells this distribution from one that is 10% off in one token.
    other = exact * np.where(np.arange(8) == 1, 1.1, 1.0)
    assert chi_square(counts, other / other.sum()) < 1e-4


def test_draws_at_different_positions_samples_and_prompts_are_independent():
    ids = jnp.arange(DRAWS, dtype=jnp.int32)
    zero, seed = jnp.zeros_like(ids), jnp.uint32(3)
    streams = [
        uniforms(seed, ids, zero, zero),
        uniforms(seed, zero, ids, zero),
        uniforms(seed, zero, zero, ids),
    ]
    streams += [
        uniforms(jnp.uint32(4), ids, zero, zero),
        uniforms(seed, ids, zero + 1, zero),
        uniforms(seed, ids, zero, zero + 1),
    ]
    for u in np.asarray(streams):
        assert chi_square(np.histogram(u, 20, (0, 1))[0], np.full(20, 0.05)) > 1e-4
    correlation = np.corrcoef(np.asarray(streams)) - np.eye(len(streams))
    assert np.abs(correlation).max() < 5 / np.sqrt(DRAWS)


def test_a_draw_does_not_depend_on_what_is_drawn_with_it():
    ids = jnp.arange(7, dtype=jnp.int32)
    together = np.asarray(uniforms(jnp.uint32(1), ids, ids * 2, ids + 5))
    for i in range(7):
        alone = uniforms(
            jnp.uint32(1), *(jnp.asarray([value], jnp.int32) for value in (i, 2 * i, i + 5))
        )
        assert np.asarray(alone)[0] == together[i]


@pytest.mark.parametrize("V", [30, 300])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_draw_is_the_inverse_of_the_cumulative_probability(temperature, V):
    """300 tokens are three blocks, the last of which is not full."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (500, V)).astype(np.float32) / temperature
    u = rng.random(500).astype(np.float32)
    cumulative = np.cumsum([softmax(row.astype(np.float64)) for row in logits], axis=-1)
    expected = [
        int(np.searchsorted(row, value, side="right"))
        for row, value in zip(cumulative, u, strict=True)
    ]
    assert np.asarray(draw_jit(jnp.asarray(logits), jnp.asarray(u), None)).tolist() == expected


@pytest.mark.parametrize("filters", [(20, 1.0, 0.0), (0, 0.9, 0.0)], ids=str)
def test_no_token_of_probability_0_in_a_large_vocabulary(filters):
    """The numbers are those where a sum that was taken in blocks and rounded rises at a token of
    probability 0."""
    logits = np.random.default_rng(0).normal(0, 3, (4, 50_000)).astype(np.float32)
    kept = np.asarray(keep_jit(jnp.asarray(logits), *as_arrays(filters)))
    masked = jnp.where(kept, logits, -jnp.inf)
    cumulative = np.asarray(jnp.cumsum(jax.nn.softmax(masked, axis=-1), axis=-1))
    for row, allowed, logits_V in zip(cumulative, kept, masked, strict=True):
        rises = np.flatnonzero((np.diff(row) > 0) & ~allowed[1:])
        u = np.float32(
            np.resize(
                [*(row[rises] / row[-1]), 0.0, 1 - 2.0**-23, np.nextafter(np.float32(1), 0)], 48
            )
        )
        tokens = np.asarray(
            draw_jit(jnp.broadcast_to(logits_V, (48, 50_000)), jnp.asarray(u), None)
        )
        assert (tokens < 50_000).all()
        assert allowed[tokens].all()


def test_the_largest_number_draws_the_last_token_that_can_be_drawn():
    logits = jnp.asarray([[0.0, 0.0, -jnp.inf], [-jnp.inf, 0.0, 0.0]], jnp.float32)
    top = jnp.full(2, np.nextafter(np.float32(1), 0))
    assert np.asarray(draw_jit(logits, top, None)).tolist() == [1, 2]
    assert np.asarray(draw_jit(logits, jnp.zeros(2), None)).tolist() == [0, 1]


def test_logits_that_are_not_numbers_draw_a_token_of_the_vocabulary():
    rows = jnp.full((1, 9), jnp.nan)
    for filters in (None, as_arrays((3, 0.5, 0.1))):
        assert 0 <= int(draw_jit(rows, jnp.asarray([0.5]), filters)[0]) < 9


def test_every_row_is_drawn_as_its_own_parameters_say():
    """Rows of one batch with and without filters, warm and greedy, draw what each draws alone."""
    every = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
    ]
    every += [SamplingParams(temperature=1.5, min_p=0.4), SamplingParams(temperature=0, top_k=1)]
    N = len(every)
    logits = np.random.default_rng(0).normal(0, 1, (N, 30)).astype(np.float32)
    numbers = tuple(np.arange(k, k + N, dtype=np.int32) for k in (3, 5, 7))
    tokens, logps = map(np.asarray, jax.jit(choose)(logits, numbers, Draws.of(every, 9))[:2])
    for i, params in enumerate(every):
        alone = jax.jit(choose)(
            logits[i : i + 1], tuple(n[i : i + 1] for n in numbers), Draws.of([params], 9)
        )
        assert int(alone[0][0]) == tokens[i]
        scaled = logits[i].astype(np.float64) / (params.temperature or 1.0)
        np.testing.assert_allclose(logps[i], np.log(softmax(scaled))[tokens[i]], atol=1e-5)
        if not params.temperature:
            assert tokens[i] == logits[i].argmax()
    assert sorted(np.argsort(-logits[2])[:2]).count(tokens[2]) == 1
    again = jax.jit(choose)(
        np.repeat(logits, 3, 0),
        tuple(np.repeat(n, 3) for n in numbers),
        Draws.of(every, 9).repeat(3),
    )
    assert np.asarray(again[0]).tolist() == np.repeat(tokens, 3).tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -0.1}, "temperature must be a finite number from 0 on"),
        ({"temperature": float("nan")}, "temperature must be a finite number from 0 on"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_p": 1.1}, "top_p must lie in"),
        ({"min_p": -0.1}, "min_p must lie in"),
        ({"min_p": 1.5}, "min_p must lie in"),
        ({"stop": ("x", "")}, "stop must not hold an empty string"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_one_stop_string_is_no_list_of_characters():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)


def test_the_seeds_of_a_generator_and_of_weights_are_those_that_differ():
    rows = [SamplingParams()]
    drawn = {
        int(jax.random.key_data(jax.random.key(Draws.of(rows, seed).seed))[1])
        for seed in (0, 1, 2**31, 2**32 - 1)
    }
    assert drawn == {0, 1, 2**31, 2**32 - 1}
    assert [checked_seed(seed) for seed in (0, 2**32 - 1)] == [0, 2**32 - 1]
    for seed in (-1, 2**32, 2**63):
        with pytest.raises(ValueError, match="a seed is a number from 0 to 4294967295"):
            policy.create("tiny-deepseek", seed)
        with pytest.raises(ValueError, match="a seed is a number from 0 to"):
            checked_seed(seed)
