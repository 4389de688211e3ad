"""`rl reward test` runs a reward on its examples and says what is wrong."""

import pytest

from rewards import RewardError
from rewards.check import main, run_examples

FILE = """
import time

EXAMPLES = {
    "equal": [
        {"prompt": "2 + 2?", "completion": "4", "answer": "4", "score": 1.0},
        {"prompt": "2 + 2?", "completion": "5", "answer": "4", "score": 0},
        {"prompt": "2 + 2?", "completion": "5", "answer": None, "score": None},
        {"prompt": "2 + 2?", "completion": "5", "answer": "4", "options": {"wrong": -1.0}, "score": -1.0},
    ],
    "wrong": [
        {"prompt": "2 + 2?", "completion": "5", "score": 1.0},
        {"prompt": "2 + 2?", "completion": "4", "score": 1.0},
        {"prompt": "2 + 2?", "completion": "", "score": None},
    ],
    "sleeps": [{"prompt": "", "completion": text, "score": 1.0} for text in "ab"],
    "malformed": [{"prompt": "", "score": 1.0}],
}

def equal(completions, answer, wrong=0.0):
    return [None if a is None else 1.0 if c == a else wrong for c, a in zip(completions, answer)]

def wrong(prompts, completions):
    return [1.0 / len(text) * (text == "4") for text in completions]

def sleeps(completions):
    time.sleep(1000)

def malformed(completions):
    return [1.0]

def without(prompts, completions):
    return [1.0] * len(completions)

def without_and_broken(prompts, completions):
    return 1.0

def without_but_needs(completions, answer, topic):
    return [1.0]
"""


ONE_BY_ONE = """
EXAMPLES = [{"prompt": "", "completion": "4", "score": 1.0}, {"prompt": "", "completion": "5", "score": 1.0}]
def one(completions):
    return [1.0]
"""


def test_a_reward_that_returns_one_value_for_a_group_does_not_pass(tmp_path, capsys):
    (tmp_path / "one.py").write_text(ONE_BY_ONE)
    report = run_examples(f"{tmp_path}/one.py:one")
    assert all(outcome.passed for outcome in report.outcomes) and not report.passed
    assert main(f"{tmp_path}/one.py:one") == 1
    out = capsys.readouterr().out
    assert "returned 1 values for 2 completions" in out and "one number for each completion" in out


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return f"{tmp_path}/own.py"


def test_examples_that_hold_pass(file, capsys):
    assert main(f"{file}:equal") == 0
    assert "4 of 4 passed" in capsys.readouterr().out


def test_examples_that_do_not_hold_fail_one_by_one(file, capsys):
    report = run_examples(f"{file}:wrong")
    assert [outcome.passed for outcome in report.outcomes] == [False, True, False]
    assert report.outcomes[0].got == 0.0
    assert report.outcomes[2].fault.kind == "raised"
    assert main(f"{file}:wrong") == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "ZeroDivisionError" in printed
    assert "1 of 3 passed" in printed


def test_a_hang_ends_the_test(file, capsys):
    report = run_examples(f"{file}:sleeps", timeout_s=0.3)
    assert [outcome.fault.kind for outcome in report.outcomes] == ["timeout"]
    assert report.skipped == 1
    assert main(f"{file}:sleeps", timeout_s=0.3) == 1
    out = capsys.readouterr().out
    assert (
        "1 more not run" in out
        and "--timeout: 0.3" in out
        and "`--timeout SECONDS` waits longer" in out
    )


def test_the_deadline_of_the_test_can_be_set(tmp_path, monkeypatch):
    from rl.commands import cli

    (tmp_path / "slow.py").write_text(
        "import time\nEXAMPLES = [{'prompt': '', 'completion': '', 'score': 1.0}]\n"
        "def slow(completions):\n    time.sleep(0.4)\n    return [1.0] * len(completions)\n"
    )
    assert cli.main(["reward", "test", f"{tmp_path}/slow.py:slow", "--timeout", "0.2"]) == 1
    assert cli.main(["reward", "test", f"{tmp_path}/slow.py:slow", "--timeout", "5"]) == 0
    with pytest.raises(SystemExit):
        cli.main(["reward", "test", f"{tmp_path}/slow.py:slow", "--timeout", "0"])


def test_without_examples_it_says_how_to_add_them(file, capsys):
    assert main(f"{file}:without") == 0
    assert "EXAMPLES = [" in capsys.readouterr().out
    assert main(f"{file}:without_and_broken") == 1
    assert "returned a float" in capsys.readouterr().out
    assert main(f"{file}:without_but_needs") == 2
    assert '"answer": ..., "topic": ...' in capsys.readouterr().out


def test_options_lie_under_those_of_an_example(file):
    report = run_examples(f"{file}:equal", {"wrong": 0.25})
    assert [outcome.got for outcome in report.outcomes] == [1.0, 0.25, None, -1.0]


def test_what_cannot_be_used_exits_like_a_bad_configuration(file, capsys):
    assert main("no_such_reward") == 2
    assert "unknown reward" in capsys.readouterr().out
    assert main(f"{file}:equal", {"wrongs": 1}) == 2
    assert "nearest: wrong" in capsys.readouterr().out
    with pytest.raises(
        RewardError, match=r"EXAMPLES\[0\] of .*own.py:malformed lacks 'completion'"
    ):
        run_examples(f"{file}:malformed")
