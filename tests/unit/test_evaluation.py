"""Accuracy and pass@k, with a generator and a reward that say what they are told."""

import functools
import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from rl.config.data import EvaluationOptions
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.errors import ConfigError, DataError
from rl.run.load import load
from rl.run.steps.held_out import HeldOutMetrics, is_due
from rl.stages.sampling import evaluation
from rl.stages.sampling.evaluation import Evaluation
from rl.statistics import pass_at_k
from rollout import Completion, SamplingParams
from rollout.collect import Source, collect


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(4, 1, 2), (6, 3, 2), (5, 0, 3), (5, 5, 1), (5, 4, 2), (8, 2, 8)]
)
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_a_correct_one(samples, correct, k):
    choices = list(itertools.combinations(range(samples), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(
        np.mean([min(choice) < correct for choice in choices])
    )


class Scripted:
    """Generator and runner in one: sample j of problem i gets `scores[i][j]`; remembers what it was
    asked."""

    counts = {}

    def __init__(self, greedy, sampled):
        self.scores, self.asked, self.added = {True: greedy, False: sampled}, [], []

    def reset_prefix_cache(self):
        self.added = []

    def stream(self, prompts, params, ids):
        """The last ones first: what counts is the number of a sample."""
        self.asked.append((params, list(ids)))
        for index, sample in reversed(
            list(itertools.product(range(len(prompts)), range(params.n)))
        ):
            yield index, sample, Completion([5], [0.0], "stop", "x")

    def open(self, prompts, columns, groups, on_calls):
        def total():
            rewards = np.asarray(self.scores[self.asked[-1][0].temperature == 0], float).reshape(-1)
            assert sorted(self.added) == list(range(len(rewards))) and len(prompts) == len(rewards)
            return SimpleNamespace(total=rewards)

        return SimpleNamespace(
            result=total, add=lambda sample, text, **columns: self.added.append(sample)
        )


def evaluate(greedy, sampled=None, **options):
    script = Scripted(greedy, sampled)
    problems = [Problem(Example("1+1=", columns={"answer": "2"}), [7]) for _ in greedy]
    settings = EvaluationOptions.model_validate({"data": {"task": "arithmetic"}} | options)
    params = SamplingParams(
        n=3, max_new_tokens=9, temperature=0.7, top_k=3, stop=("!",), stop_token_ids=(2,)
    )
    sample = functools.partial(collect, Source(script, script))
    return Evaluation(settings, problems, sample, params).run(), script.asked


def test_a_completion_without_a_score_is_neither_right_nor_wrong_and_counted():
    result, asked = evaluate([1.0, 0.0, math.nan, 2.0])
    assert (
        result["eval/greedy_accuracy"] == pytest.approx(2 / 3) and result["eval/reward_mean"] == 1.0
    )
    assert result["eval/unscored"] == 1.0 and result["eval/problems"] == 4.0
    assert (
        asked[0][0].temperature == 0
        and asked[0][0].stop == ("!",)
        and asked[0][0].max_new_tokens == 9
        and len(asked) == 1
    )
    assert not any(key.startswith("eval/pass@") for key in result)
    result, _ = evaluate([math.nan, math.nan])
    assert result["eval/unscored"] == 2.0
    assert "eval/greedy_accuracy" not in result and "eval/reward_mean" not in result


def test_pass_at_k_is_the_mean_over_problems_at_a_temperature_of_its_own():
    sampled = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, math.nan, 1], [math.nan, math.nan, math.nan, 1]]
    result, asked = evaluate([0.0] * 4, sampled, samples=4, k=[1, 2], temperature=0.5)
    assert result["eval/pass@1"] == pytest.approx((0.25 + 0 + 2 / 3 + 1) / 4)
    assert result["eval/pass@2"] == pytest.approx(
        (0.5 + 0 + 1) / 3
    )  # the last problem has one scored sample
    assert result["eval/unscored_samples"] == 4.0
    assert asked[1][0].n == 4 and asked[1][0].temperature == 0.5 and asked[1][0].top_k == 0
    # Draws from ids that no prompt of training has, the same at every evaluation.
    assert asked[0][1] == asked[1][1] and min(asked[1][1]) >= 1 << 30


class Voting(Scripted):
    """A generator whose samples 0 and 1 say yes and whose third says no."""

    def stream(self, prompts, params, ids):
        for index, sample, _ in super().stream(prompts, params, ids):
            yield index, sample, Completion([5], [0.0], "stop", "no" if sample == 2 else "yes")


def test_maj_at_k_is_whether_the_answer_of_most_samples_is_right():
    script = Voting([0.0] * 3, [[1, 1, 0], [0, 0, 1], [math.nan, 1, 1]])
    problems = [Problem(Example("Is it?", columns={"answer": "x"}), [7]) for _ in range(3)]
    settings = EvaluationOptions.model_validate(
        {"data": {"task": "arithmetic"}, "samples": 3, "k": [1], "maj": [3]}
    )
    sample = functools.partial(collect, Source(script, script))
    params = SamplingParams(max_new_tokens=9)
    asked = Evaluation(settings, problems, sample, params, answer=lambda text: text or None)
    assert asked.run()["eval/maj@3"] == pytest.approx(0.5)  # the last one has two scored samples


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["evaluation.samples=2", "evaluation.maj=[3]"], r"between 1 and samples \(2\), got 3"),
        (
            ["evaluation.samples=2", "evaluation.maj=[2]", "rewards.functions=[length]"],
            "no reward tells what a completion answers",
        ),
    ],
)
def test_majorities_need_samples_and_a_reward_that_tells_answers(keys, message):
    with pytest.raises(ConfigError, match=message):
        load(["configs/quickstart.yml"], keys)


def test_penalties_and_forbidden_texts_are_those_of_the_evaluation():
    own = {"repetition_penalty": 1.5, "bad_words": ["x"], "logit_bias": {"5": -1}, "min_tokens": 2}
    _, asked = evaluate([0.0], [[1, 1]], samples=2, **own)
    for params, _ in asked:
        assert (params.repetition_penalty, params.bad_words, params.logit_bias) == (
            1.5,
            ("x",),
            {5: -1.0},
        )
        assert params.min_tokens == 2 and params.presence_penalty == 0


def test_what_counts_as_correct_can_be_said():
    assert (
        evaluate([0.7 + 0.2 + 0.1, 0.99])[0]["eval/greedy_accuracy"] == 0.5
    )  # 1 but for the rounding of the sum
    assert evaluate([0.4, 0.6], correct_at=0.5)[0]["eval/greedy_accuracy"] == 0.5


def test_evaluations_are_due_every_so_many_steps():
    options = EvaluationOptions.model_validate({"data": {"task": "arithmetic"}, "every": 3})
    evaluation = Evaluation(options, [], None, None)
    assert [step for step in range(1, 8) if is_due(step, evaluation.every)] == [3, 6]
    assert not any(is_due(step, every=0) for step in range(1, 8))


def test_a_metric_of_ones_own_gets_each_column_once():
    read = []

    class Columns(dict):
        def get(self, name):
            read.append(name)
            return super().get(name)

    examples = [Example("p", columns=Columns(a=n, b=n)) for n in range(20)]
    problems = [SimpleNamespace(example=each) for each in examples]
    texts = [SimpleNamespace(text="x", raw=None)] * 20
    name = f"{__file__}:sum_of_a"
    assert evaluation._own_metric(name, problems, texts, np.zeros(20)) == {"eval/sum_of_a": 190.0}
    assert len(read) == 40


def sum_of_a(a):
    return sum(a)


def test_a_metric_of_ones_own_sees_greedy_completions_with_their_columns(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def seen(prompts, completions, raw, rewards, answer):\n"
        "    right = answer == ['2', '2'] and completions == raw == ['x', 'x']\n"
        "    return {'first': rewards[0], 'count': len(prompts)} if right else None\n"
        "def wrong(completions):\n    return 'much'\n"
    )
    result, _ = evaluate([0.25, 1.0], metrics=[f"{file}:seen"])
    assert (result["eval/seen/first"], result["eval/seen/count"]) == (0.25, 2.0)
    with pytest.raises(DataError, match="wrong: gave 'much'"):
        evaluate([0.0], metrics=[f"{file}:wrong"])


def test_resharding_for_an_evaluation_is_no_part_of_the_step():
    """`time/step` and `time/idle` are known before it."""
    kind = SimpleNamespace(every=1, run=lambda step: {"eval/problems": 3.0, "time/eval": 2.0})
    options = SimpleNamespace(steps=9, held_out=None, until=None)
    stage = SimpleNamespace(name="grpo", options=options, evaluation=lambda problems: kind)
    run = SimpleNamespace(
        evaluation_problems=[],
        resharded=lambda: nullcontext({"time/sync": 0.5}),
        timeline=SimpleNamespace(span=lambda *place, **details: nullcontext()),
    )
    metrics = {"time/step": 4.0, "time/sync": 0.25}
    assert not HeldOutMetrics(run, stage).after_step(None, 1, metrics)
    assert metrics == {
        "time/step": 4.0,
        "time/sync": 0.25,
        "eval/problems": 3.0,
        "time/eval": 2.5,
    }
