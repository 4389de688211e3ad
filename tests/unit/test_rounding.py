"""Rewards that differ by the rounding of a sum are equal: for every estimator, filter and
metric."""

import numpy as np
import pytest
import trajectories

import rl.algorithms
from rewards import Runner, RunnerOptions, Scores
from rewards.workers.rounding import all_equal, at_least, without_rounding
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.stages.producers.scored import ScoredGroup
from rl.stages.sampling.metrics import group_metrics
from rollout.types import Completion

PROBLEM = Problem(Example("p"), [7])
ALMOST = [[0.3, 0.1 + 0.2, 0.3, 0.3]]
ONE_APART = [[0.0, 0.3, 0.1 + 0.2, 0.3]]
GROUP_RELATIVE = [
    *(("grpo", {"scale": scale}) for scale in ("group", "batch", "none", "others")),
    ("rloo", {}),
    ("rloo", {"normalize_advantages": True}),
    ("opo", {}),
    ("maxrl", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"baseline": True}),
]


def test_values_that_floats_hold_exactly_stay_and_rounding_goes():
    exact = np.array([[1e12, 1e12 + 1, 0.5, np.nan], [0.0, 2.0**-40, 0.25, -np.inf]])
    np.testing.assert_array_equal(without_rounding(exact), exact)
    np.testing.assert_array_equal(without_rounding(ONE_APART), [[0.0, 0.3, 0.3, 0.3]])
    np.testing.assert_array_equal(
        without_rounding(np.float32([0.1, 0.3, 0.30000001])), np.float32([0.1, 0.3, 0.3])
    )
    assert without_rounding(np.zeros((2, 0))).shape == (2, 0)


def test_the_bound_is_relative_to_the_numbers_that_were_summed():
    left = 1e9 * (0.1 + 0.2) - 1e9 * 0.3  # 0 but for rounding
    assert left != 0 and not all_equal([left, 0.0])
    assert not without_rounding([left, 0.0], summed=[6e8, 6e8]).any()


@pytest.mark.parametrize(("name", "options"), GROUP_RELATIVE)
def test_rounding_is_no_signal_for_an_estimator(name, options):
    algorithm = rl.algorithms.get(name, **options)
    lengths = np.array([[2, 3, 2, 4]])
    assert not np.any(algorithm.advantages(np.array(ALMOST), lengths))
    exact = algorithm.advantages(np.array([[0.0, 0.3, 0.3, 0.3]]), lengths)
    np.testing.assert_allclose(
        algorithm.advantages(np.array(ONE_APART), lengths), exact, rtol=1e-12
    )
    assert exact.any()


def test_the_advantage_among_others_is_not_divided_by_rounding():
    advantages = rl.algorithms.get("grpo", scale="others").advantages(np.array(ONE_APART))
    assert advantages[0, 0] == pytest.approx(-0.3)


def test_several_rewards_that_cancel_give_no_advantage():
    grpo = rl.algorithms.get("grpo", combine="normalize_then_sum")
    one = np.array([[0.1, 0.7, 0.3, 0.2]])
    both = np.stack([one, 0.3 - one], axis=-1)
    assert not np.any(grpo.advantages(both, weights=[1.0, 1.0]))


def test_remax_and_raft_take_rounding_for_equal():
    remax = rl.algorithms.get("remax").advantages(np.array(ALMOST), greedy=[0.3])
    assert not remax.any()
    keep = rl.algorithms.get("raft", keep=1).advantages(np.array(ALMOST))
    assert keep.tolist() == [[1, 0, 0, 0]]
    assert not rl.algorithms.get("raft", keep=4, threshold=0.3).advantages(np.array(ALMOST)).any()


def test_filters_and_metrics_take_rounding_for_equal():
    completion = Completion([1], [0.0], "stop", "a", 1)
    total = np.array(ALMOST[0])
    rollouts = trajectories.rollouts([PROBLEM], [0], [[completion] * 4])
    group = ScoredGroup(rollouts.groups[0], total[:, None], total)
    assert group.has_zero_std(None) and group.has_zero_std(0)
    scores = Scores(total[:, None], total, ("own",), [], {})
    result = group_metrics(rollouts, scores, drafted=False)
    assert (
        result["reward/frac_zero_std"] == 1.0
        and result["reward/std"] == 0.0
        and result["reward/unscored"] == 0.0
    )


def test_groups_without_a_score_are_in_no_statistic():
    completion = Completion([1], [0.0], "stop", "a", 1)
    rollouts = trajectories.rollouts([PROBLEM] * 2, [0, 1], [[completion] * 2] * 2)
    for total, expected in (
        ([np.nan, np.nan, 1.0, 0.0], 0.0),
        ([np.nan, np.nan, 1.0, 1.0], 1.0),
        ([np.nan] * 4, None),
    ):
        scores = Scores(np.array(total)[:, None], np.array(total), ("own",), [], {})
        result = group_metrics(rollouts, scores, drafted=False)
        assert result.get("reward/frac_zero_std") == expected and ("reward/std" in result) == (
            expected is not None
        )
        assert result["reward/unscored"] == np.isnan(total).sum()


def test_a_weighted_sum_reaches_its_threshold():
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert at_least([0.7 + 0.2 + 0.1, 0.999, np.nan], 1.0).tolist() == [True, False, False]


def test_weighted_sums_of_a_group_are_equal_but_for_the_rounding_of_the_sum(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def own(completions, sign=1): return [sign * float(text) for text in completions]\n"
    )
    spec = f"{file}:own"
    functions = ((spec, 1e9, {}), (spec, 1e9, {"sign": -3}), (spec, 2e9, {}))
    with Runner(RunnerOptions(functions, workers=1)) as runner:
        total = runner.score([""] * 2, ["0.1", "0.7"], {}, groups=[0, 0]).total
    assert total[0] == total[1]
