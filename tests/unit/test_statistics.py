"""Estimates of evaluations, against a bootstrap, brute force and textbook formulas."""

import itertools

import numpy as np
import pytest

from rl import statistics
from rl.statistics import Estimate


def bootstrap(values, weights=None, draws=20_000):
    """The 95% percentile interval of a (weighted) mean over resampled problems."""
    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    rows = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    means = (values[rows] * weights[rows]).sum(axis=1) / weights[rows].sum(axis=1)
    return np.quantile(means, [0.025, 0.975])


def shares_of(problems, samples, seed):
    rng = np.random.default_rng(seed)
    return rng.binomial(samples, rng.uniform(0.1, 0.9, problems)) / samples


@pytest.mark.parametrize(("problems", "samples"), [(60, 8), (300, 4), (300, 1)])
def test_the_interval_of_an_accuracy_is_that_of_a_bootstrap_over_problems(problems, samples):
    values = shares_of(problems, samples, seed=3)
    estimate = statistics.mean(values)
    assert estimate.value == pytest.approx(values.mean()) and estimate.n == problems
    # A tenth of the width: the noise of the quantiles, and Wilson's shift towards the middle.
    width = estimate.high - estimate.low
    assert [estimate.low, estimate.high] == pytest.approx(bootstrap(values), abs=0.1 * width)


def test_problems_that_count_several_times_have_the_interval_of_a_bootstrap_over_problems():
    values = shares_of(200, 3, seed=4)
    weights = np.random.default_rng(5).integers(1, 4, 200)
    estimate = statistics.mean(values, weights)
    assert estimate.value == pytest.approx(np.average(values, weights=weights))
    width = estimate.high - estimate.low
    expected = bootstrap(values, weights)
    assert [estimate.low, estimate.high] == pytest.approx(expected, abs=0.1 * width)


def test_one_sample_each_has_wilsons_interval():
    """Wilson's interval is where the score test of the share does not reject."""
    estimate = statistics.mean([1.0] * 7 + [0.0] * 23)
    for bound in (estimate.low, estimate.high):
        score = (7 / 30 - bound) / np.sqrt(bound * (1 - bound) / 30)
        assert abs(score) == pytest.approx(1.959964, abs=1e-6)


def test_equal_problems_are_no_certainty():
    assert statistics.mean([1.0, 1.0, 1.0]).low == pytest.approx(3 / (3 + 1.959964**2))
    assert statistics.mean([0.5, 0.5]).low < 0.15
    assert statistics.mean([0.0]) == Estimate(0.0, 0.0, pytest.approx(0.7935, abs=1e-4), 1)


def test_a_problem_without_a_score_is_left_out():
    assert statistics.mean([np.nan]) is None
    assert statistics.mean([1.0, np.nan, 0.0]).n == 2
    right_PG = np.asarray([[1, np.nan, 0, 1], [np.nan] * 4])
    assert statistics.shares(right_PG).tolist()[0] == pytest.approx(2 / 3)
    assert np.isnan(statistics.shares(right_PG)[1])
    assert np.isnan(statistics.pass_shares(right_PG, 4)).all()
    assert statistics.pass_shares(right_PG, 2)[0] == 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(k):
    right_PG = np.random.default_rng(1).integers(0, 2, (12, 6)).astype(float)
    right_PG[0] = 0
    expected = [
        np.mean([max(choice) for choice in itertools.combinations(row, k)]) for row in right_PG
    ]
    assert statistics.pass_shares(right_PG, k) == pytest.approx(expected)


def most_frequent(answers):
    """The first of the answers that occur most often, None for no vote."""
    votes = [answer for answer in answers if answer is not None]
    return max(votes, key=votes.count) if votes else None


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_majorities_are_those_of_all_orders_of_the_samples(k):
    """The mean over 100 draws is within four of its standard errors of all permutations."""
    answers_PG = [
        ["a", "b", "b", "a", "c"],
        ["a", None, None, "b", "b"],
        ["c", "b", "a", "d", "e"],
        [None] * 5,
        ["a"] * 5,
    ]
    right_PG = np.asarray([[float(each == "a") for each in row] for row in answers_PG])
    result = statistics.majority_shares(right_PG, answers_PG, k, seed=1)
    for share, answers in zip(result, answers_PG, strict=True):
        exact = np.mean(
            [most_frequent(order[:k]) == "a" for order in itertools.permutations(answers)]
        )
        error = np.sqrt(exact * (1 - exact) / statistics.DRAWS)
        assert share == pytest.approx(exact, abs=4 * error + 1e-12)


def test_majorities_are_seeded_and_need_k_scored_samples():
    right_PG = np.asarray([[1, 0, 1, 0, 0, 1.0], [1, np.nan, np.nan, 1, 1, 1]])
    answers_PG = [["a", "b", "a", "c", "b", "a"], ["a"] * 6]
    seeds = [1, 1, *range(2, 9)]
    result = [statistics.majority_shares(right_PG, answers_PG, 3, seed)[0] for seed in seeds]
    assert result[0] == result[1] and len(set(result)) > 1
    five = statistics.majority_shares(right_PG, answers_PG, 5)
    assert np.isnan(five[1]) and not np.isnan(five[0])


@pytest.mark.parametrize(
    ("answers", "draw", "right"),
    [
        ("ab", [0, 1], 1),  # as many votes: the first of the draw
        ("ab", [1, 0], 0),
        ("bab", [2, 1, 0], 0),
        ("bcaa", [0, 1, 2, 3], 1),
        ("cbbaa", [0, 1, 3, 4, 2], 0),
        ("a--", [1, 2, 0], 1),  # - does not vote
        ("--", [0, 1], 0),
    ],
)
def test_votes_of_a_draw(answers, draw, right):
    answers = [None if each == "-" else each for each in answers]
    right_G = np.asarray([float(each == "a") for each in answers])
    assert statistics._majority(right_G, answers, np.asarray([draw])) == right


def test_a_paired_difference_has_the_interval_of_a_bootstrap_over_problems():
    before = shares_of(150, 4, seed=6)
    after = np.clip(before + np.random.default_rng(7).normal(0.05, 0.1, 150), 0, 1)
    estimate = statistics.paired_difference(before, after)
    assert estimate.value == pytest.approx(np.mean(after - before))
    width = estimate.high - estimate.low
    assert [estimate.low, estimate.high] == pytest.approx(
        bootstrap(after - before), abs=0.1 * width
    )
    unpaired = statistics.mean(before), statistics.mean(after)
    assert width < 0.5 * max(each.high - each.low for each in unpaired)


def test_problems_without_a_difference_leave_room_for_a_rare_one():
    """Of n problems none differs with a chance of 2.5% where a share 1 - 0.025^(1/n) does."""
    estimate = statistics.paired_difference([0.0] * 20, [0.0] * 20)
    assert estimate.value == 0 and (1 - estimate.high) ** 20 == pytest.approx(0.025)
    assert statistics.paired_difference([np.nan], [1.0]) is None
