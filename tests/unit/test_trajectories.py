"""A trajectory is data: rows of a batch, records and checkpoints of one with two segments, a tool
between turns and weights that changed, against arrays written by hand."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rewards import Scores
from rl.commands import cli
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.records import samples
from rl.records.samples import STOP, TRAINED
from rl.stages import online
from rl.stages.inputs import StepData
from rl.stages.sampling import filters
from rl.stages.sampling.batches import by_row, one_row_each, to_batch
from rl.stages.sampling.metrics import generator_flops, group_metrics
from rl.stages.sampling.records import sample_lines, token_records
from rl.views.viewer.tokens import numbers
from rollout import Completion
from rollout.collect import ReadyScores, Rollouts
from rollout.types import Group, Kept, Segment, Trajectory, Turn

NAN = None


def array(values, dtype):
    return np.asarray(values, dtype)


def episode() -> Trajectory:
    """Prompt 1 2, turn 10 11, tool 20 21, turn 12 13 with new weights from 13 on; then the history
    is rewritten as 1 9, and turn 14 is cut off."""
    first = Segment(
        tokens=array([1, 2, 10, 11, 20, 21, 12, 13], np.int32),
        policy=array([0, 0, 1, 1, 0, 0, 1, 1], bool),
        logprobs=array([0, 0, -1, -2, 0, 0, -3, -4], np.float32),
        versions=array([0, 0, 3, 3, 0, 0, 3, 4], np.int32),
        turns=(Turn(2, 4, "stop", "a", None, 2), Turn(6, 8, "stop", "b", "b!", 1)),
        values=array([0, 0, 0.5, 0.25, 0, 0, 0.5, 0.75], np.float32),
        kept=Kept(
            ids=array([[10, -1], [11, 12], [12, -1], [5, 13]], np.int32),
            counts=array([1, 2, 1, 2], np.int32),
            logprobs=array([0, -0.5, 0, -0.25], np.float32),
        ),
    )
    second = Segment(
        tokens=array([1, 9, 14], np.int32),
        policy=array([0, 0, 1], bool),
        logprobs=array([0, 0, -5], np.float32),
        versions=array([0, 0, 4], np.int32),
        turns=(Turn(2, 3, "length", "c"),),
    )
    return Trajectory((first, second), "length", (0.5, None, 1.0))


PLAIN = {
    "segments": [
        {
            "tokens": [1, 2, 10, 11, 20, 21, 12, 13],
            "policy": [[2, 4], [6, 8]],
            "logprobs": [-1.0, -2.0, -3.0, -4.0],
            "versions": [[2, 3], [7, 4]],
            "turns": [
                {"start": 2, "end": 4, "finish": "stop", "text": "a", "raw": None, "steps": 2},
                {"start": 6, "end": 8, "finish": "stop", "text": "b", "raw": "b!", "steps": 1},
            ],
            "values": [0.5, 0.25, 0.5, 0.75],
            "kept": {
                "ids": "eJzjYmBg+A8E3ECaB4pBfFYgzQvEAJfgCDg=",
                "counts": [1, 2, 1, 2],
                "logprobs": [0.0, -0.5, 0.0, -0.25],
            },
        },
        {
            "tokens": [1, 9, 14],
            "policy": [[2, 3]],
            "logprobs": [-5.0],
            "versions": 4,
            "turns": [
                {"start": 2, "end": 3, "finish": "length", "text": "c", "raw": None, "steps": 0}
            ],
        },
    ],
    "finish": "length",
    "rewards": [0.5, None, 1.0],
}


def sampled() -> Rollouts:
    """Two samples of a prompt: the episode, and one of a single turn."""
    plain = Trajectory.of_completion([1, 2], Completion([15, 16], [-6.0, -7.0], "stop", "d"), 4)
    problem = Problem(Example("p", columns={}), [1, 2])
    scores = Scores(np.array([[1.0], [0.0]]), np.array([1.0, 0.0]), ("own",), [], {})
    counts = {"useful": 7, "rows": 8, "prefill": 4, "preempted": 0, "tokens": 7}
    return Rollouts([Group(problem, 5, [episode(), plain])], ReadyScores(scores), counts, 1.0)


def test_a_row_of_the_batch_is_a_segment():
    batch = to_batch(sampled(), 8, values=True)
    assert batch.prompt.tolist() == [0, 0, 0]
    assert batch.tokens.tolist() == [
        [1, 2, 10, 11, 20, 21, 12, 13],
        [1, 9, 14, 0, 0, 0, 0, 0],
        [1, 2, 15, 16, 0, 0, 0, 0],
    ]
    assert batch.mask.tolist() == [
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
    ]
    assert batch.sampler_logp.tolist() == [
        [0, 0, -1, -2, 0, 0, -3, -4],
        [0, 0, -5, 0, 0, 0, 0, 0],
        [0, 0, -6, -7, 0, 0, 0, 0],
    ]
    assert batch.version.tolist() == [
        [0, 0, 3, 3, 0, 0, 3, 4],
        [0, 0, 4, 0, 0, 0, 0, 0],
        [0, 0, 4, 4, 0, 0, 0, 0],
    ]
    assert batch.segments.sum(axis=1).tolist() == [8, 3, 4] and batch.segments.max() == 1
    assert batch.old_values is None  # one segment has none
    one = Group(None, 0, [Trajectory(episode().segments[:1], "stop")])
    values = to_batch(Rollouts([one], None, {}, 0.0), 8, values=True).old_values
    assert values.tolist() == [[0, 0, 0.5, 0.25, 0, 0, 0.5, 0.75]]


def test_rows_of_a_trajectory_share_what_it_has():
    made = sampled()
    assert by_row(made, [0.5, -1.5]).tolist() == [0.5, 0.5, -1.5]
    assert [(row.group, row.trajectory) for row in made.rows] == [(0, 0), (0, 0), (0, 1)]
    with pytest.raises(ValueError, match="a critic reads one segment of a trajectory, .* has 2"):
        one_row_each(made, "a critic")


def test_filters_are_those_of_the_tokens_that_the_policy_wrote():
    made = sampled()
    segments = [row.segment for row in made.rows]
    batch, metrics = filters.with_kept(to_batch(made, 8), segments, 4, 40)
    assert [[i for i in ids if i >= 0] for ids in batch.kept[0].tolist()] == [
        [],
        [],
        [10],
        [11, 12],
        [],
        [],
        [12],
        [5, 13],
    ]
    assert batch.sampler_logp[0].tolist() == [0, 0, 0, -0.5, 0, 0, 0, -0.25]
    assert batch.sampler_logp[1].tolist() == [0, 0, -5, 0, 0, 0, 0, 0]
    assert (batch.kept[1:] == -1).all() and metrics["sampler/kept_mean"] == 1.5


def test_records_have_turns_flags_and_versions(tmp_path, capsys):
    made = sampled()
    batch = to_batch(made, 8)
    batch = batch.replace(advantages=by_row(made, [0.5, -0.5]))
    arrays = {name: np.ones((3, 8), np.float32) for name in ("logp_diff", "entropy")}
    tokens = token_records(made, batch, arrays)
    shown = numbers(tokens[0])
    assert shown["id"] == [1, 2, 10, 11, 20, 21, 12, 13, 1, 9, 14]
    assert shown["turn"] == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 3]
    assert shown["logp"] == [NAN, NAN, -1, -2, NAN, NAN, -3, -4, NAN, NAN, -5]
    both = TRAINED | STOP
    wrote = [2, 3, 6, 7, 10]
    assert shown["flags"] == [0, 0, TRAINED, both, 0, 0, TRAINED, both, 0, 0, TRAINED]
    for name in ("advantage", "gap", "entropy"):
        value = 0.5 if name == "advantage" else 1.0
        assert [place for place, each in enumerate(shown[name]) if each == value] == wrote
    assert numbers(tokens[1])["flags"] == [0, 0, TRAINED, both]

    lines = sample_lines(made, made.scores.result(), "grpo", 1, np.array([0.5, -0.5]))
    episode_line, plain = lines
    assert episode_line["version"] == [[2, 3], [7, 4]] and plain["version"] == 4
    assert (episode_line["completion"], episode_line["raw"]) == ("abc", "ab!c")
    assert episode_line["tokens"] == [10, 11, 20, 21, 12, 13, 1, 9, 14]
    assert (episode_line["n_prompt"], episode_line["n"]) == (2, 9)
    assert episode_line["segments"] == [8, 3] and "segments" not in plain
    assert episode_line["finish"] == "length" and plain["finish"] == "stop"
    log = samples.SampleLog(tmp_path)
    log.write(lines, tokens)
    log.close()
    for line, own in zip(samples.read(tmp_path), tokens, strict=True):
        assert samples.read_tokens(tmp_path / "samples.jsonl", line).tobytes() == own.tobytes()
    (tmp_path / "events.jsonl").write_text("")
    assert cli.main(["samples", str(tmp_path), "version:4", "sample:0", "--json"]) == 0
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (shown["version"], shown["n"]) == ([[2, 3], [7, 4]], 9)
    assert cli.main(["samples", str(tmp_path)]) == 0


def test_counts_are_those_of_trajectories():
    made = sampled()
    metrics = group_metrics(made, made.scores.result(), drafted=True)
    assert metrics["completion/mean_length"] == 3.5 and metrics["completion/max_length"] == 5
    assert metrics["completion/truncated_ratio"] == 0.5
    assert metrics["completion/mean_terminated_length"] == 2
    assert metrics["speculative/accepted_per_step"] == pytest.approx(7 / 3 - 1)
    lengths = []
    generator_flops(made, SimpleNamespace(forward=lambda n, weighed: lengths.extend(n)))
    assert lengths == [8, 3, 4]


def test_json_holds_a_trajectory():
    own = episode()
    assert own.to_json() == PLAIN
    read = Trajectory.from_json(json.loads(json.dumps(PLAIN)))
    assert (read.finish, read.rewards, read.turns) == (own.finish, own.rewards, own.turns)
    for one, other in zip(read.segments, own.segments, strict=True):
        for name in ("tokens", "policy", "logprobs", "versions", "values"):
            expected = getattr(other, name)
            np.testing.assert_array_equal(getattr(one, name), expected)
            assert expected is None or getattr(one, name).dtype == expected.dtype
    kept = own.segments[0].kept
    for name in ("ids", "counts", "logprobs"):
        np.testing.assert_array_equal(getattr(read.segments[0].kept, name), getattr(kept, name))
    assert read.segments[1].kept is None


def test_a_segment_with_arrays_of_several_lengths_is_refused():
    one = episode().segments[0]
    with pytest.raises(ValueError, match="arrays of several shapes"):
        Segment(one.tokens, one.policy, one.logprobs[1:], one.versions, one.turns)
    with pytest.raises(ValueError, match="wrote 3 tokens, and kept has 4"):
        replace(one, policy=one.policy & (one.tokens != 13))


@pytest.mark.parametrize(
    ("updates", "aggregation", "reader"),
    [(2, "token", "updates_per_step above 1"), (1, "sequence", "a loss that counts sequences")],
)
def test_a_stage_that_counts_rows_refuses_several_segments(updates, aggregation, reader):
    stage = online.Stage.__new__(online.Stage)
    stage.options = SimpleNamespace(updates_per_step=updates)
    stage.algorithm = SimpleNamespace(aggregation=aggregation)
    with pytest.raises(ValueError, match=reader):
        stage._check_rows(sampled())
    stage.options.updates_per_step, stage.algorithm.aggregation = 1, "token"
    stage._check_rows(sampled())


def test_every_row_of_a_trajectory_has_its_advantage():
    made = sampled()
    lengths = []

    def estimate(rewards_PG, lengths_PG, batch):
        lengths.append(lengths_PG.tolist())
        return rewards_PG.reshape(-1) * 2 - 1, None, {}

    stage = online.Stage.__new__(online.Stage)
    stage.algorithm = SimpleNamespace(with_coefs=lambda coefs: stage.algorithm, estimate=estimate)
    stage.context = SimpleNamespace(
        progress=SimpleNamespace(adaptive_coefs={}),
        timeline=SimpleNamespace(span=lambda name: contextlib.nullcontext()),
    )
    batch = to_batch(made, 8)
    data = StepData(None, batch=batch, rollouts=made, rewards=np.array([[1.0, 0.0]]))
    stage._add_advantages(data)
    assert data.advantages.tolist() == [1.0, -1.0]
    assert data.batch.advantages.tolist() == [1.0, 1.0, -1.0]
    assert lengths == [[[5, 2]]]
