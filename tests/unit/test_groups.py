"""Dynamic sampling: which groups fill a step, which are kept for the next one, and what a
checkpoint makes of them."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import trajectories
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import RewardFault, Scores
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.errors import ModelError, RewardStop
from rl.stages import online
from rl.stages.context import Progress
from rl.stages.producers.curriculum_feedback import CurriculumFeedback
from rl.stages.producers.dynamic import DynamicSampling
from rl.stages.producers.interface import Producer
from rl.stages.producers.scored import ScoredGroup
from rl.stages.sampling.unscored import check_scored
from rollout import Completion
from rollout.collect import ReadyScores
from rollout.types import Turn


class Runner:
    names = ("right", "style")


def source(batches, problems=100):
    """A producer that gives these batches of groups' rewards [P][G], whatever it is asked for, the
    second function always differing."""
    given, rows = iter(batches), iter(range(problems))

    def take(count):
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
            {"rewards/right/mean": float(right.mean()), "reward/timeouts": 1.0},
            seconds=[0.5, 1.5],
        )
        sampled = trajectories.rollouts(
            problems_of(taken),
            [10 + row for row in taken],
            completions,
            ReadyScores(scores),
            {"useful": 1, "rows": 2},
            [3] * len(taken),
        )
        groups = [replace(group, row=row) for group, row in zip(sampled.groups, taken, strict=True)]
        return replace(sampled, groups=groups)

    return OfFunction(take)


class OfFunction(Producer):
    """A producer whose `take` is a function."""

    def __init__(self, take):
        self.take = take

    def take(self, count):
        raise NotImplementedError


def problems_of(rows):
    return [Problem(Example(f"p{row}"), [100 + row]) for row in rows]


def dynamic(producer, most=10, reward=None, carried=(), router_replay=False, rows=100):
    notes = []
    stage = SimpleNamespace(
        name="dapo",
        context=SimpleNamespace(
            events=SimpleNamespace(note=notes.append),
            timeline=SimpleNamespace(span=lambda name: nullcontext(SimpleNamespace(seconds=0.25))),
            notes=notes,
        ),
        algorithm=SimpleNamespace(dynamic_batches=most, dynamic_reward=reward),
        options=SimpleNamespace(router_replay=router_replay),
        runner=Runner,
        rows=SimpleNamespace(take=problems_of, total=rows),
    )
    sampling = DynamicSampling(producer, stage)
    sampling.restore(json.loads(json.dumps({"carried": [group.to_json() for group in carried]})))
    return sampling


def stored(group):
    """The group as a checkpoint gives it back."""
    return ScoredGroup.from_json(json.loads(json.dumps(group.to_json())), problems_of)


def test_carried_groups_of_rows_that_changed_are_left_out():
    sampling = dynamic(source([[[1, 0], [0, 1], [1, 0], [0, 1]]]))
    sampling.take(1)
    carried = sampling.carried
    assert [each.group.row for each in carried] == [1, 2, 3]
    assert dynamic(source([]), carried=carried)._stage.context.notes == []
    other = dynamic(source([]), carried=carried, rows=3)  # row 3 is gone
    assert [each.group.row for each in other.carried] == [1, 2]
    (group, *_) = carried
    moved = replace(group, group=replace(group.group, row=2))  # row 2 has another prompt
    other = dynamic(source([]), carried=[moved, *carried[1:]])
    assert [each.group.row for each in other.carried] == [2, 3]
    assert other._stage.context.notes == [
        "dapo: 1 groups of the step before are left out: the rows of their prompts have changed"
    ]


def prompt_ids(rollouts):
    return [group.prompt_id for group in rollouts.groups]


def test_groups_with_zero_std_make_room_for_others():
    sampling = dynamic(source([[[1, 1], [0, 1], [0, 0]], [[1, 0], [0, 1], [1, 0]]]))
    result = sampling.take(3)
    assert prompt_ids(result) == [11, 13, 14]
    assert [problem.example.prompt for problem in result.problems] == ["p1", "p3", "p4"]
    assert [each.new_tokens for each in result.trajectories[::2]] == [[1, 0], [3, 0], [4, 0]]
    assert result.scores.result().total.tolist() == [0, 1, 1, 0, 0, 1]
    assert (result.counts["rows"], result.seconds) == (4, 1.0)
    assert [each.group.row for each in sampling.carried] == [5]
    assert result.metrics == pytest.approx(
        {
            "dynamic/batches": 2,
            "dynamic/kept_share": 4 / 6,
            "dynamic/carried": 0,
            "dynamic/without_difference": 0,
            "dynamic/reward_mean": 0.5,
        }
    )
    result = sampling.take(1)
    assert (prompt_ids(result), sampling.carried, result.counts["rows"]) == ([15], [], 0)
    assert result.metrics["dynamic/carried"] == 1 and result.metrics["dynamic/batches"] == 0


def test_metrics_of_rewards_are_of_the_kept_groups_and_counts_of_all():
    sampling = dynamic(source([[[1, 1], [0, 1], [0, 0]], [[1, 0], [1, 1], [1, 1]]]))
    result = sampling.take(2)
    assert prompt_ids(result) == [11, 13] and result.waiting == 2 * 0.25
    assert result.scores.result().metrics == pytest.approx(
        {
            "rewards/right/mean": 0.5,
            "rewards/right/std": 0.5,
            "rewards/style/mean": 0.5,
            "rewards/style/std": 0.5,
            "reward/timeouts": 2,
            "time/reward_calls": 4,
            "time/reward_p50_s": 1,
            "time/reward_p99_s": 1.5,
        }
    )


def test_groups_with_routes_are_not_carried():
    sampling = dynamic(source([[[1, 0], [0, 1]]]), router_replay=True)
    sampling.take(1)
    assert sampling.carried == [] and sampling.state() == {"carried": []}


def test_where_too_few_differ_others_fill_the_step():
    sampling = dynamic(source([[[1, 1], [0, 0]], [[0, 0], [0, 1]]]), most=2)
    result = sampling.take(2)
    assert (prompt_ids(result), sampling.carried) == ([13, 10], [])
    assert result.metrics["dynamic/without_difference"] == 1


def test_the_function_that_has_to_differ_can_be_named():
    result = dynamic(source([[[1, 1], [0, 0]]]), reward="style").take(2)
    assert prompt_ids(result) == [10, 11]
    assert result.metrics["dynamic/kept_share"] == 1


def test_a_group_without_scores_has_zero_std():
    nothing = np.full((2, 2), np.nan)
    assert ScoredGroup(None, nothing, nothing[:, 0]).has_zero_std(None)
    lone = np.array([[1.0, 0.0], [np.nan, 1.0]])
    assert ScoredGroup(None, lone, lone[:, 0]).has_zero_std(None)


def test_a_group_survives_a_checkpoint():
    sampling = dynamic(source([[[0, 0, 1], [np.nan, 0.7, 1 / 3]]]))
    sampling.take(1)
    (scored,) = sampling.carried
    again = stored(scored)
    assert (again.group.row, again.group.prompt_id) == (1, 11)
    assert again.group.problem == scored.group.problem
    for read, own in zip(again.group.trajectories, scored.group.trajectories, strict=True):
        assert read.to_json() == own.to_json()
        assert (read.versions, read.text, read.new_tokens) == (3, own.text, own.new_tokens)
    np.testing.assert_array_equal(again.rewards, scored.rewards)
    np.testing.assert_array_equal(again.total, scored.total)


# A group in a checkpoint of the version that kept completions, `version` and no prompt.
OLD = """{"row": 4, "prompt_id": 17, "version": 6, "completions": [
{"tokens": [5, 9], "logprobs": [-0.5, -0.25], "finish": "stop", "text": "59", "raw": null,
 "steps": 2},
{"tokens": [8], "logprobs": [-1.5], "finish": "length", "text": "8", "raw": "<8>", "steps": 1,
 "filtered_logprobs": [-0.125], "kept_counts": [2], "kept": "eJxjYWBg4ABiAABIAA0="}],
"rewards": [[1.0, 0.0], [0.0, 1.0]], "total": [1.0, 0.5], "logs": {"1": {"right": "no"}},
"faults": []}"""


def test_a_checkpoint_of_an_earlier_version_holds_completions():
    plain = json.loads(OLD)
    values = {"prompts": 18, "version": 6, "drawn": 20, "carried": [plain], "controls": {}}
    (carried,) = Progress.from_json(values | {"unscored_steps": 0}).producer["carried"]
    read = ScoredGroup.from_json(carried, problems_of)
    first, second = (each.segments[0] for each in read.group.trajectories)
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([104, 5, 9], [104, 8])
    assert first.policy.tolist() == [False, True, True]
    assert first.logprobs.tolist() == [0, -0.5, -0.25] and first.versions.tolist() == [0, 6, 6]
    assert first.turns == (Turn(1, 3, "stop", "59", None, 2),) and first.kept is None
    assert second.turns == (Turn(1, 2, "length", "8", "<8>", 1),)
    assert second.kept.ids.tolist() == [[4, 8]] and second.kept.counts.tolist() == [2]
    assert second.kept.logprobs.tolist() == [-0.125]
    assert (read.group.row, read.group.prompt_id, read.total.tolist()) == (4, 17, [1.0, 0.5])
    assert read.logs == {1: {"right": "no"}}


@pytest.mark.parametrize("missing", ["row", "completions", "version"])
def test_a_group_of_another_form_is_refused_by_name(missing):
    plain = json.loads(OLD)
    del plain[missing]
    with pytest.raises(ModelError, match="a group that it carries to the next step") as raised:
        ScoredGroup.from_json(plain, problems_of)
    assert raised.value.exit_code == 4


def test_a_resumed_stage_goes_on_counting_steps_without_a_score():
    progress = Progress(unscored_steps=2)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    earlier = progress.to_json()
    del earlier["unscored_steps"]  # as an earlier version wrote it
    assert Progress.from_json(earlier).unscored_steps == 0
    stage = online.Stage.__new__(online.Stage)
    stage.name, stage.context = "grpo", SimpleNamespace(progress=progress)
    stage.options = SimpleNamespace(rewards=SimpleNamespace(unscored_steps=4), total_steps=9)
    stage.config = SimpleNamespace(rewards_of=lambda options: options.rewards)
    unscored, scored = (
        Scores(np.full((2, 1), each), np.full(2, each), ("f",), [], {}) for each in (np.nan, 1.0)
    )
    check_scored(stage, unscored)
    with pytest.raises(RewardStop, match="grpo: no completion of the last 4 steps has a score"):
        check_scored(stage, unscored)
    check_scored(stage, scored)
    assert progress.unscored_steps == 0
    progress.unscored_steps = 2
    progress.start_stage({})
    assert progress.unscored_steps == 0


def test_faults_and_logs_go_with_their_completions():
    sampled = source([[[1, 1, 1], [0, 1, np.nan], [np.nan, 1, 0]]]).take(3)
    faults = [
        RewardFault("right", sample, kind, "", "", "")
        for sample, kind in ((2, "died"), (5, "timeout"), (6, "raised"))
    ]
    scores = replace(
        sampled.scores.result(), faults=faults, logs={3: {"right": "three"}, 8: {"right": "eight"}}
    )
    sampled = replace(sampled, scores=ReadyScores(scores))
    producer = OfFunction(lambda count: sampled)
    sampling = dynamic(producer)
    result = sampling.take(1)
    (fault,) = result.scores.result().faults
    assert (fault.sample, fault.kind) == (2, "timeout") and result.scores.result().logs == {
        0: {"right": "three"}
    }
    left = sampling.carried
    result = dynamic(source([[[0, 1, 0]]]), carried=left).take(2)
    (fault,) = result.scores.result().faults
    assert (fault.sample, fault.kind) == (0, "raised") and result.scores.result().logs == {
        2: {"right": "eight"}
    }
    plain = {
        name: value for name, value in left[0].to_json().items() if name not in ("faults", "logs")
    }
    earlier = ScoredGroup.from_json(plain, problems_of)  # of an older version
    assert earlier.faults == [] and earlier.logs == {}


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
    producer = source(
        [[[0, int(differs)] for differs in batch] for batch in differences], problems=200
    )
    expected = [
        10 + row for row, differs in enumerate(d for batch in differences for d in batch) if differs
    ]
    used = []
    sampling = dynamic(producer, most=10)
    for _ in range(3):
        result = sampling.take(requested)
        metrics = result.metrics
        assert len(result.groups) == requested or metrics["dynamic/batches"] == 10
        used += prompt_ids(result)[: requested - int(metrics["dynamic/without_difference"])]
    assert used == expected[: len(used)]
    assert [each.group.prompt_id for each in sampling.carried] == expected[
        len(used) : len(used) + len(sampling.carried)
    ]


def test_a_filter_has_what_the_other_producer_has_unless_it_says_otherwise():
    inner = OfFunction(None)
    assert (inner.calls_generator, inner.on_policy, inner.versions_of_this_run) == (True,) * 3
    inner.calls_generator = inner.versions_of_this_run = False
    inner.faults = lambda: iter(["fault"])
    inner.state = lambda: {"inner": 1}
    filtered = dynamic(inner)
    assert (filtered.calls_generator, filtered.versions_of_this_run) == (False, False)
    assert not filtered.on_policy and list(filtered.faults()) == ["fault"]
    assert filtered.state() == {"inner": 1, "carried": []}
    inner.on_policy = False
    assert not CurriculumFeedback(inner, None).on_policy
    inner.on_policy = True
    assert CurriculumFeedback(inner, None).on_policy
