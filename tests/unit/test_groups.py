"""Dynamic sampling: which groups fill a step, which are kept for the next one, and what a
checkpoint makes of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import RewardFault, Scores
from rl.errors import ModelError, RewardStop
from rl.stages import online
from rl.stages.context import Progress
from rl.stages.sampling.dynamic import DynamicSampling, ReadyScores, ScoredGroup
from rollout import Completion
from rollout.collect import Rollouts


class Runner:
    names = ("right", "style")


def source(batches, problems=100):
    """A `sample` that gives these batches of groups' rewards [P][G], the second function always
    differing, and what it gave.
    """
    given, rows = iter(batches), iter(range(problems))

    def sample():
        right = np.asarray(next(given), float)
        rewards = np.stack(
            [right, np.broadcast_to(np.arange(right.shape[1]), right.shape)], axis=-1
        )
        taken = [next(rows) for _ in right]
        completions = [
            [
                Completion([row, i], [-0.5, -0.25], "stop", f"{row}.{i}")
                for i in range(right.shape[1])
            ]
            for row in taken
        ]
        scores = Scores(
            rewards.reshape(-1, 2),
            right.reshape(-1),
            Runner.names,
            [],
            {"rewards/right/mean": float(right.mean())},
        )
        counts = {"useful": 1, "rows": 2}
        return Rollouts(
            [f"p{r}" for r in taken],
            [10 + r for r in taken],
            completions,
            ReadyScores(scores),
            counts,
            0.5,
            [3] * len(taken),
        ), taken

    return sample


def dynamic(most=10, reward=None):
    return DynamicSampling(most, reward, lambda rows: [f"p{row}" for row in rows], Runner)


def test_groups_without_a_difference_make_room_for_others():
    sample = source([[[1, 1], [0, 1], [0, 0]], [[1, 0], [0, 1], [1, 0]]])
    result, left, metrics = dynamic().fill(3, [], sample)
    assert result.prompt_ids == [11, 13, 14]
    assert result.problems == ["p1", "p3", "p4"]
    assert [group[0].tokens for group in result.completions] == [[1, 0], [3, 0], [4, 0]]
    assert result.scores.result().total.tolist() == [0, 1, 1, 0, 0, 1]
    assert (result.counts["rows"], result.seconds) == (4, 1.0)
    assert [group.row for group in left] == [5]
    assert metrics == pytest.approx(
        {
            "dynamic/batches": 2,
            "dynamic/kept_share": 4 / 6,
            "dynamic/carried": 0,
            "dynamic/without_difference": 0,
            "dynamic/reward_mean": 0.5,
        }
    )
    result, left, metrics = dynamic().fill(1, left, sample)
    assert (result.prompt_ids, left, result.counts["rows"]) == ([15], [], 0)
    assert metrics["dynamic/carried"] == 1 and metrics["dynamic/batches"] == 0


def test_where_too_few_differ_others_fill_the_step():
    result, left, metrics = dynamic(most=2).fill(
        2, [], source([[[1, 1], [0, 0]], [[0, 0], [0, 1]]])
    )
    assert (result.prompt_ids, left) == ([13, 10], [])
    assert metrics["dynamic/without_difference"] == 1


def test_the_function_that_has_to_differ_can_be_named():
    result, _, metrics = dynamic(reward="style").fill(2, [], source([[[1, 1], [0, 0]]]))
    assert result.prompt_ids == [10, 11]
    assert metrics["dynamic/kept_share"] == 1


def test_a_group_without_scores_does_not_differ():
    nothing = np.full((2, 2), np.nan)
    assert not ScoredGroup(0, 0, 0, [], nothing, nothing[:, 0]).differs(None)
    lone = np.array([[1.0, 0.0], [np.nan, 1.0]])
    assert not ScoredGroup(0, 0, 0, [], lone, lone[:, 0]).differs(None)


def test_a_group_survives_a_checkpoint():
    _, (group,), _ = dynamic().fill(1, [], source([[[0, 0, 1], [np.nan, 0.7, 1 / 3]]]))
    again = ScoredGroup.from_json(json.loads(json.dumps(group.to_json())))
    assert again.completions == group.completions
    assert (again.row, again.prompt_id, again.version) == (
        group.row,
        group.prompt_id,
        group.version,
    )
    np.testing.assert_array_equal(again.rewards, group.rewards)
    np.testing.assert_array_equal(again.total, group.total)


def test_a_resumed_stage_goes_on_counting_steps_without_a_score():
    progress = Progress(unscored_steps=2)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    earlier = progress.to_json()
    del earlier["unscored_steps"]  # as an earlier version wrote it
    assert Progress.from_json(earlier).unscored_steps == 0
    stage = online.Stage.__new__(online.Stage)
    stage.name, stage.context = "grpo", SimpleNamespace(progress=progress)
    stage.options = SimpleNamespace(rewards=SimpleNamespace(unscored_steps=4), total_steps=9)
    unscored, scored = (
        Scores(np.full((2, 1), each), np.full(2, each), ("f",), [], {}) for each in (np.nan, 1.0)
    )
    online._check_scored(stage, unscored)
    with pytest.raises(RewardStop, match="grpo: no completion of the last 4 steps has a score"):
        online._check_scored(stage, unscored)
    online._check_scored(stage, scored)
    assert progress.unscored_steps == 0
    progress.unscored_steps = 2
    progress.start_stage({})
    assert progress.unscored_steps == 0


def test_faults_and_logs_go_with_their_completions():
    sampled, rows = source([[[1, 1, 1], [0, 1, np.nan], [np.nan, 1, 0]]])()
    faults = [
        RewardFault("right", sample, kind, "", "", "")
        for sample, kind in ((2, "died"), (5, "timeout"), (6, "raised"))
    ]
    scores = replace(
        sampled.scores.result(), faults=faults, logs={3: {"right": "three"}, 8: {"right": "eight"}}
    )
    sampled = replace(sampled, scores=ReadyScores(scores))
    result, left, _ = dynamic().fill(1, [], lambda: (sampled, rows))
    (fault,) = result.scores.result().faults
    assert (fault.sample, fault.kind) == (2, "timeout") and result.scores.result().logs == {
        0: {"right": "three"}
    }
    left = [ScoredGroup.from_json(json.loads(json.dumps(group.to_json()))) for group in left]
    result, _, _ = dynamic().fill(2, left, source([[[0, 1, 0]]]))
    (fault,) = result.scores.result().faults
    assert (fault.sample, fault.kind) == (0, "raised") and result.scores.result().logs == {
        2: {"right": "eight"}
    }
    plain = {
        name: value for name, value in left[0].to_json().items() if name not in ("faults", "logs")
    }
    assert (
        ScoredGroup.from_json(plain).faults == [] and ScoredGroup.from_json(plain).logs == {}
    )  # of an older version


@pytest.mark.parametrize("kept", [None, ["prompts", "version", "drawn"], ["seen"]])
def test_progress_that_another_version_wrote_is_a_clear_error(kept):
    plain = Progress(adaptive_coefs={"kl/coef": 0.1}).to_json()
    assert Progress.from_json(json.loads(json.dumps(plain))) == Progress(
        adaptive_coefs={"kl/coef": 0.1}
    )
    with pytest.raises(
        ModelError, match="written by another version of Duet: .* new one in another run.dir"
    ) as raised:
        Progress.from_json(None if kept is None else {name: plain.get(name, 0) for name in kept})
    assert raised.value.exit_code == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=40, max_size=40),
    st.integers(1, 4),
)
def test_every_group_that_differs_is_used_once_and_in_order(differences, requested):
    """Over several steps, with batches of three groups, some of which differ."""
    sample = source(
        [[[0, int(differs)] for differs in batch] for batch in differences], problems=200
    )
    expected = [
        10 + row for row, differs in enumerate(d for batch in differences for d in batch) if differs
    ]
    used, left = [], []
    for _ in range(3):
        result, left, metrics = dynamic(most=10).fill(requested, left, sample)
        assert len(result.prompt_ids) == requested or metrics["dynamic/batches"] == 10
        used += result.prompt_ids[: requested - int(metrics["dynamic/without_difference"])]
    assert used == expected[: len(used)]
    assert [group.prompt_id for group in left] == expected[len(used) : len(used) + len(left)]
