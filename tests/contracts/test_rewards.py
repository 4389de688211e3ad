"""Every built-in reward, listed from the folder, proves itself on its examples and keeps the same
promises."""

import importlib
import inspect
import math

import pytest

import rewards
from rewards import RewardError, Runner, RunnerOptions, registry
from rewards.check import run_examples

BUILT_IN = sorted(registry._builtins())
NEEDED_OPTIONS = {"regex_format": {"pattern": "x"}, "reward_model": {"source": "rm"}}


def module_of(name):
    """The module of a built-in reward."""
    return importlib.import_module(rewards.load(name).__module__)


def usable(name):
    """Skips a reward whose optional package is not installed here."""
    try:
        registry.check(name, NEEDED_OPTIONS.get(name, {}))
    except RewardError as error:
        if "pip install" not in str(error):
            raise
        pytest.skip(str(error))


def test_the_promised_rewards_are_there():
    promised = {
        "exact_answer",
        "numeric_answer",
        "regex_format",
        "length",
        "soft_overlong",
        "math",
        "reasoning_gym",
    }
    assert promised <= set(BUILT_IN)
    assert set(BUILT_IN) <= set(rewards.known())


@pytest.mark.parametrize("name", BUILT_IN)
def test_examples_hold_in_a_worker(name):
    usable(name)
    report = run_examples(name, timeout_s=30.0)
    assert len(report.outcomes) >= 3
    for outcome in report.outcomes:
        assert outcome.passed, outcome
    assert len({outcome.expected for outcome in report.outcomes}) > 1  # a constant would not pass


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_group_scores_as_its_completions_do_alone(name):
    usable(name)
    own = ("prompt", "completion", "score", "options", "max_new_tokens")
    examples = [e for e in module_of(name).EXAMPLES if "options" not in e]
    options = NEEDED_OPTIONS.get(name, {}) | ({"limit": 100} if name == "soft_overlong" else {})
    examples = examples or [{"prompt": "", "completion": text} for text in ("x", "y")]
    columns = {
        "completion_lengths": [7 * i for i in range(len(examples))],
        "truncated": [False] * len(examples),
    }
    columns["reward_model_scores"] = [{"rm": 0.5 * i} for i in range(len(examples))]
    columns |= {key: [e[key] for e in examples] for key in examples[0] if key not in own}
    prompts, completions = ([e[key] for e in examples] for key in ("prompt", "completion"))
    with Runner(RunnerOptions(((name, 1.0, options),), timeout_s=30.0)) as runner:
        alone = runner.score(prompts, completions, columns)
        together = runner.score(prompts, completions, columns, groups=[0] * len(examples))
    assert alone.faults == together.faults == []
    assert [repr(score) for score in alone.total] == [repr(score) for score in together.total]


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_documented_and_takes_the_texts(name):
    function = rewards.load(name)
    module = module_of(name)
    assert module.__doc__
    assert function.__doc__
    named = list(inspect.signature(function).parameters)
    assert named[:2] == ["prompts", "completions"]
    for option in named[2:]:
        given = option in registry.GIVEN or any(option in example for example in module.EXAMPLES)
        assert given or f"{option}:" in function.__doc__, (
            f"{option} is neither a column of the examples nor documented"
        )
    with pytest.raises(RewardError, match="has no option 'no_such_option'"):
        registry.check(name, {"no_such_option": 1})


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_completion_of_messages_scores_as_its_text(name):
    usable(name)
    example = next(
        (e for e in module_of(name).EXAMPLES if e["score"] not in (None, 0.0)),
        None,
    )
    options = example.get("options", {})
    columns = {
        k: [v] for k, v in example.items() if k not in ("prompt", "completion", "score", "options")
    }
    columns |= {k: v[0] for k, v in columns.items() if k == "max_new_tokens"}
    message = [{"role": "assistant", "content": example["completion"]}]
    with Runner(RunnerOptions(((name, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
        score = runner.score([[{"role": "user", "content": example["prompt"]}]], [message], columns)
    assert math.isclose(score.total[0], example["score"])
