"""Groups that come from the folder of an earlier run: they are the recorded ones, and what cannot
be trained on is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_trajectories import episode

from rewards import RewardFault, Scores
from rl.commands import train
from rl.config.run import RunConfig
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.errors import DataError
from rl.records.json_lines import line
from rl.records.samples import SampleLog
from rl.run import prepare
from rl.run.resume import continued
from rl.stages import create, metric_names
from rl.stages.context import Progress
from rl.stages.producers.recorded import Recorded
from rl.stages.producers.scored import joined, split
from rl.stages.sampling.records import sample_lines, token_records
from rollout import Completion
from rollout.collect import Rollouts
from rollout.text.tokenizer import characters
from rollout.types import Group, Trajectory

LETTERS = "abcdefgh"


def completion(text, finish="stop"):
    tokens = characters(LETTERS).encode(text, add_special_tokens=False)
    logprobs = [-0.125 * (n + 1) for n in range(len(tokens))]
    return Completion(tokens, logprobs, finish, text, raw=f"<{text}>")


def groups_of(step):
    """Two prompts with two samples each; in step 2 one is an episode of two segments."""
    made = []
    for number, texts in enumerate([["a", "bcd"], ["ef", "g"]]):
        problem = Problem(
            Example(f"p{number}", columns={"answer": "x"}, source="s"), [3, 4 + number]
        )
        trajectories = [
            Trajectory.of_completion(problem.ids, completion(text, finish), step)
            for text, finish in zip(texts, ["stop", "length"], strict=True)
        ]
        made.append(Group(problem, 10 * step + number, trajectories))
    if step == 2:
        made[1].trajectories[0] = episode()
    return made


def scores_of(names):
    rewards = np.array([[1.0], [0.1 + 0.2], [np.nan], [0.0]])
    fault = RewardFault(names[0], 2, "raised", "", "", "")
    return Scores(rewards, rewards[:, 0] * 2, names, [fault], {}, {1: {names[0]: "a log"}})


@pytest.fixture
def folder(tmp_path):
    """A run of two steps, with an evaluation between them and the samples of another stage."""
    log = SampleLog(tmp_path / "run")
    scores = scores_of(("exact_answer",))
    for stage, step in (("sft", 1), ("grpo", 1), ("grpo", 2)):
        made = Rollouts(groups_of(step), None, {}, 1.0)
        for advantages in (np.ones(4), None):  # None: an evaluation
            lines = sample_lines(made, scores, stage, step, advantages)
            log.write(lines, token_records(made))
    log.close()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def directory(tmp_path):
    (tmp_path / "run").mkdir()


def producer(folder, alphabet=LETTERS, rewards=("exact_answer",), weight=2.0, **options):
    shape = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "rollouts": str(folder)}
    shape["sampling"] = {"max_new_tokens": 8}
    config = RunConfig.model_validate(
        {
            "model": "tiny",
            "tokenizer": {"source": "characters", "alphabet": alphabet},
            "rewards": {"functions": [{"name": name, "weight": weight} for name in rewards]},
            "data": {"task": "arithmetic"},
            "max_length": 16,
            "stages": [{"algorithm": "grpo"} | shape | options],
        }
    )
    (stage,) = create(config)
    stage.context = SimpleNamespace(progress=Progress())
    made = stage.producer
    assert isinstance(made, Recorded)
    return made, stage


def test_the_groups_of_a_step_are_those_that_were_recorded(folder):
    made, stage = producer(folder)
    assert not stage.calls_generator and stage.problems() == []
    made.check_files()
    for step in (1, 2):
        taken, expected = made.take(2), groups_of(step)
        assert [each.prompt_id for each in taken.groups] == [10 * step, 10 * step + 1]
        assert stage.context.progress.next_prompt_id == 10 * step + 2
        for own, group in zip(taken.groups, expected, strict=True):
            assert own.problem.example.prompt == group.problem.example.prompt
            assert own.problem.example.columns == {"answer": "x"}
            for read, trajectory in zip(own.trajectories, group.trajectories, strict=True):
                assert (read.finish, read.versions) == (trajectory.finish, trajectory.versions)
                assert len(read.segments) == len(trajectory.segments)
                for one, other in zip(read.segments, trajectory.segments, strict=True):
                    for name in ("tokens", "policy", "logprobs", "versions"):
                        a, b = getattr(one, name), getattr(other, name)
                        np.testing.assert_array_equal(a, b)
                        assert a.dtype == b.dtype
                    spans = [(turn.start, turn.end, turn.finish) for turn in one.turns]
                    assert spans == [(turn.start, turn.end, turn.finish) for turn in other.turns]
        scores = taken.scores.result()
        np.testing.assert_array_equal(scores.rewards, scores_of(scores.names).rewards)
        np.testing.assert_array_equal(scores.total, scores_of(scores.names).total)
        (fault,) = scores.faults
        assert (fault.sample, fault.kind, scores.logs[1]) == (
            2,
            "raised",
            {"exact_answer": "a log"},
        )
        lines = sample_lines(taken, scores, "grpo", step, np.ones(4))
        first = Rollouts(expected, None, {}, 1.0)
        again = sample_lines(first, scores, "grpo", step, np.ones(4))
        if step == 1:
            assert list(map(line, lines)) == list(map(line, again))
            assert taken.trajectories[1].raw == "<bcd>"


def test_a_run_that_goes_on_takes_the_next_step(folder):
    made, _ = producer(folder)
    made.take(2)
    other, _ = producer(folder)
    other.restore(json.loads(json.dumps(made.state())))
    assert other.take(2).groups[0].prompt_id == 20
    other.restore({})
    assert other.take(2).groups[0].prompt_id == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alphabet": "hgfedcba"}, "samples.jsonl:9: its tokens are those of another tokenizer"),
        ({"rewards": ["exact_answer", "math"]}, "has scores of exact_answer, and the rewards"),
        ({"steps": 3}, "step 3 of grpo has 0 samples there, and the stage takes 2 x 2"),
        ({"samples_per_prompt": 4}, "step 1 of grpo has 4 samples there, .* takes 2 x 4"),
        (
            {"prompts_per_step": 1, "samples_per_prompt": 4},
            "step 1 of grpo has 2 prompts with 2 samples there, .* takes 1 x 4",
        ),
    ],
)
def test_what_a_stage_cannot_train_on_is_refused(folder, options, message):
    made, _ = producer(folder, **options)
    with pytest.raises(DataError, match=rf"stages.0.rollouts: .*{message}") as raised:
        made.check_files()
    assert raised.value.exit_code == 3


def edited(folder, change):
    lines = (folder / "samples.jsonl").read_text().splitlines()
    records = [change(json.loads(line)) for line in lines]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_folders_that_lack_something_are_refused(folder):
    made, _ = producer(folder)
    (folder / "tokens.bin").rename(folder / "elsewhere")
    with pytest.raises(DataError, match="its tokens are not recorded"):
        made.check_files()
    (folder / "elsewhere").rename(folder / "tokens.bin")
    edited(folder, lambda record: record | {"media": [{"kind": "image"}]})
    with pytest.raises(DataError, match="pictures or sounds"):
        producer(folder)[0].check_files()
    with pytest.raises(DataError, match="no such folder"):
        producer(folder / "nothing")[0].check_files()


def test_a_group_that_another_one_interrupts_is_refused(folder):
    edited(folder, lambda record: record | {"prompt_id": record["sample"]})
    with pytest.raises(DataError, match="step 1 of grpo: samples of another prompt stand between"):
        producer(folder)[0].check_files()


def test_another_number_of_groups_than_a_step_has_is_refused(folder):
    """A filter over this producer may ask for fewer."""
    made, _ = producer(folder)
    with pytest.raises(DataError, match="2 groups a step, not 1"):
        made.take(1)


def test_groups_without_a_call_of_the_generator_have_no_counts(folder):
    made, stage = producer(folder)
    taken = made.take(2)
    assert taken.counts is None
    assert joined(split(taken), [taken], ("exact_answer",)).counts is None
    sampled = replace(taken, counts={"rows": 2})
    assert joined(split(taken), [taken, sampled], ("exact_answer",)).counts == {"rows": 2}


def test_a_producer_that_returns_too_few_groups_is_refused(folder):
    made, stage = producer(folder)
    taken = made.take(2)
    stage.producer = SimpleNamespace(take=lambda count: replace(taken, groups=taken.groups[:1]))
    with pytest.raises(ValueError, match=r"returned 1 groups, and the step has 2"):
        stage.take_groups()


def test_sums_have_the_weights_of_the_stage(folder):
    made, _ = producer(folder, weight=0.5)
    scores = made.take(2).scores.result()
    np.testing.assert_array_equal(scores.total, scores_of(scores.names).rewards[:, 0] / 2)
    known = scores.rewards[[0, 1, 3], 0]
    assert scores.metrics["rewards/exact_answer/mean"] == known.mean()
    assert scores.metrics["rewards/exact_answer/std"] == known.std()


def test_the_text_of_several_turns_is_not_that_of_all_tokens(tmp_path):
    log = SampleLog(tmp_path / "run")
    groups = groups_of(1)
    (segment,) = groups[0].trajectories[1].segments
    turns = (replace(segment.turns[0], end=3), replace(segment.turns[0], start=4))
    segment = replace(segment, policy=np.array([0, 0, 1, 0, 1], bool), turns=turns)
    groups[0].trajectories[1] = replace(groups[0].trajectories[1], segments=(segment,))
    made = Rollouts(groups, None, {}, 1.0)
    lines = sample_lines(made, scores_of(("exact_answer",)), "grpo", 1, np.ones(4))
    log.write(lines, token_records(made))
    log.close()
    assert lines[1]["completion"] != "bcd"
    one, _ = producer(tmp_path / "run", steps=1)
    one.check_files()
    assert len(one.take(2).trajectories[1].turns) == 2


def test_settings_without_an_effect_are_refused_or_named(folder):
    def faults(name, **options):
        return [each.text for each in producer(folder, algorithm=name, **options)[1].check()]

    assert faults("grpo") == []
    assert "remax samples greedy completions" in " ".join(faults("remax"))
    _, stage = producer(folder, algorithm="dapo", max_logp_diff=0.1)
    assert "current_logp" not in stage.inputs
    remarks = [each for each in stage.remarks() if "no effect with rollouts" in each]
    keys = [each.partition(":")[0] for each in remarks]
    assert keys == ["stages.0.algorithm.dynamic_batches", "stages.0.max_logp_diff"]
    for metric in ("async/staleness_max", "data/epoch", "reward/faults", "generator/useful_rows"):
        assert "takes recorded samples" in metric_names.problem(stage, metric), metric
    for metric in ("reward/mean", "rewards/exact_answer/mean", "time/reward", "sampler/kl"):
        assert metric_names.problem(stage, metric) is None, metric


def test_a_stage_that_is_over_needs_no_folder(folder, monkeypatch):
    """Neither for a run that goes on nor for --check."""
    _, stage = producer(folder.parent / "gone")
    config = train.with_directory(stage.config, str(folder.parent / "new"))
    over = [continued.PlaceOfRun(0, 2, 2, ended=True)]
    damaged = [*over, continued.PlaceOfRun(0, 1, 2)]  # the newest one may be
    for places in ([], damaged):
        monkeypatch.setattr(continued, "places", lambda config, places=places: places)
        with pytest.raises(DataError, match="no such folder"):
            train.check(config, [])
    with pytest.raises(DataError, match="no such folder"):
        prepare.prepare(config)
    for module in (continued, prepare):
        monkeypatch.setattr(module, "places", lambda config: over)
    train.check(config, [])
    prepare.prepare(config).close()


def test_folders_of_older_versions_are_read(folder):
    """Lines had neither `version` nor texts with special tokens, nor logs."""
    kept = ("version", "raw", "reward_log", "faults", "columns")
    edited(folder, lambda record: {k: v for k, v in record.items() if k not in kept})
    made, _ = producer(folder)
    made.check_files()
    trajectory = made.take(2).trajectories[1]
    assert (trajectory.versions, trajectory.text, trajectory.raw) == (0, "bcd", None)
