"""Cases of the built-in rewards beyond their examples."""

import time

import math_forms
import pytest

from rewards import RewardError, text_of
from rewards.math import math
from rewards.numeric_answer import numeric_answer
from rewards.registry import check
from rewards.runner import Runner, RunnerOptions
from rewards.soft_overlong import soft_overlong
from rewards.text import answer_span, boxed


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("the answer is 1,234", "1234", 1.0),
        ("1,234,567.5", 1234567.5, 1.0),
        ("it is 12,34", "34", 0.0),  # a list, or a decimal comma
        ("from 7-3", "3", 1.0),  # a minus between numbers is no sign
        ("x = -3", "-3", 1.0),
        ("x = −3", "-3", 1.0),  # U+2212
        ("(-3)", -3, 1.0),
        ("-$5", "-5", 1.0),
        ("$-5", "-5", 1.0),
        ("about 2.5e3 m", 2500, 1.0),
        ("3 / 4", ".75", 1.0),
        ("5/0", "5", 0.0),  # no number at all
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("50%", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("0.5", "50\\%", 1.0),
        ("5000", "50%", 0.0),
        ("42.", "42", 1.0),
        ("3.0000001", "3", 1.0),
        ("3.00001", "3", 0.0),
        ("9" * 5000, "9", 0.0),
        ("1e999", "1", 0.0),
        ("10000001", "10000000", 0.0),
        ("\\dfrac{1}{3}", "1/3", 1.0),
        ("", "0", 0.0),
        ("5", "five", None),
        ([{"role": "assistant", "content": "so 4"}], 4, 1.0),
    ],
)
def test_numbers_are_read_as_people_write_them(completion, answer, score):
    assert numeric_answer(["p"], [completion], [answer]) == [score]


def test_tolerances_are_distances():
    assert numeric_answer(["p"] * 2, ["104", "106"], [100] * 2, tolerance=5) == [1.0, 0.0]
    assert numeric_answer(["p"] * 2, ["-104", "-106"], [-100] * 2, relative_tolerance=0.05) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("\\boxed{\\dfrac{ 1 }{2}}", "0.5", 1.0),
        ("\\boxed{x+1}", "$x + 1$", 1.0),
        ("\\boxed{1}, or \\boxed{2}", "1", 0.0),
        ("<answer>7</answer> then 8", "7", 1.0),
        ("5 and then 7", "7", 1.0),
        ("\\boxed{x = 7}", "7", 1.0),
        ("\\boxed{7 apples}", "7", 1.0),
        ("\\boxed{12", "12", 0.0),  # never closed: more digits may have been cut
        ("yes", "no", 0.0),
        ("yes", "Solution. \\boxed{yes}", 1.0),
        ("yes", "", None),
    ],
)
def test_math_without_its_package_compares_text_and_numbers(completion, answer, score):
    assert math(["p"], [completion], [answer], verifier="text") == [score]


def test_math_with_its_package_compares_symbolically():
    pytest.importorskip("math_verify")
    completions = ["\\boxed{(x+1)^2}", "\\boxed{x^2+2x}", "\\boxed{\\sqrt{2}/2}"]
    answers = ["x^2+2x+1", "x^2+2x+1", "\\frac{1}{\\sqrt{2}}"]
    assert math(["p"] * 3, completions, answers, verifier="math-verify") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("verifier", ["text", "math-verify"])
def test_math_gives_the_right_verdict_on_every_form(verifier):
    if verifier == "math-verify":
        pytest.importorskip("math_verify")
    table = math_forms.BOTH + (math_forms.SYMBOLIC if verifier == "math-verify" else [])
    completions, answers, scores = zip(*table, strict=True)
    given = math([""] * len(table), list(completions), list(answers), verifier=verifier)
    assert [(*row, one) for row, one in zip(table, given, strict=True) if row[2] != one] == []
    assert len(math_forms.BOTH) >= 200


def test_the_text_verifier_gives_no_false_1():
    completions, answers, _ = zip(*math_forms.SYMBOLIC, strict=True)
    assert set(
        math([""] * len(completions), list(completions), list(answers), verifier="text")
    ) == {0.0}


def test_numeric_answer_gives_the_right_verdict_on_every_form():
    completions, answers, scores = zip(*math_forms.NUMBERS, strict=True)
    assert numeric_answer([""] * len(scores), list(completions), list(answers)) == list(scores)


def test_the_last_number_of_a_long_text_takes_no_time():
    words = "so we add them and go on " * 4000
    completions = [f"9,500 {words}", f"1 2 3 {words} = 9,500 {words[:500]}", f"{words} 9,5", words]
    began = time.perf_counter()
    assert numeric_answer([""] * 4, completions, ["9500"] * 4) == [1.0, 1.0, 0.0, 0.0]
    numeric_answer([""] * 50, [f"{'2 + 2 = 4, ' * 9000} so 7"] * 50, ["7"] * 50)
    assert time.perf_counter() - began < 5


def test_soft_overlong_of_the_paper():
    """DAPO: limit 20480, cache 4096."""
    lengths = [1, 16384, 16385, 18432, 20480, 20481]
    scores = soft_overlong([""] * 6, [""] * 6, lengths, max_new_tokens=20480)
    assert scores == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="limit"):
        soft_overlong([""], [""], [5])


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("regex_format", {}, "needs the option `pattern`"),
        ("regex_format", {"pattern": "("}, "is no regular expression"),
        ("regex_format", {"pattern": "a", "match": "start"}, "'fullmatch' or 'search'"),
        ("exact_answer", {"pattern": "["}, "is no regular expression"),
        ("numeric_answer", {"tolerance": -1}, "cannot be negative"),
        ("length", {"penalty": -0.1}, "pay for length"),
        ("soft_overlong", {"limit": 10, "cache": 11}, "cache=11"),
        ("math", {"verifier": "sympy"}, "verifier is"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, words):
    with pytest.raises(RewardError, match=words):
        check(name, options)


def test_the_text_of_messages_is_what_the_assistant_said():
    tool = [
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "42"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "it is "}, {"type": "text", "text": "42"}],
        },
    ]
    assert text_of(tool) == "look\nit is 42"
    assert text_of([{"role": "user", "content": "hi"}]) == "hi"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of("plain") == "plain"


def test_answers_are_the_last_ones():
    assert answer_span("<answer>1</answer> <answer>\n2</answer>") == "\n2"
    assert answer_span("work #### 3") == " 3"
    assert answer_span("a=1, a=2", r"a=(\d)") == "2"
    assert answer_span("a=1", r"b=\d") is None
    assert boxed("\\boxed{1} \\boxed{\\frac{2}{3}}") == "\\frac{2}{3}"
    assert boxed("\\boxed{1} \\boxed{2") == ""
    assert boxed("no box") is None


VERL = "rewards.foreign.verl:compute_score"
VERL_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": bool(right), "of": f"{data_source} {extra_info} {strict}"}


async def later(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""


def test_a_function_of_verl_gets_its_arguments(tmp_path):
    (tmp_path / "my_score.py").write_text(VERL_SCORE)
    columns = {
        "data_source": ["gsm8k", "gsm8k"],
        "reward_model": [{"ground_truth": "4"}, {"ground_truth": "5"}],
        "extra_info": [{"index": 0}, {"index": 1}],
    }
    options = {"score": f"{tmp_path}/my_score.py:compute_score", "options": {"strict": True}}
    with Runner(RunnerOptions(((VERL, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
        scores = runner.score(["?", "?"], ["4", "4"], columns)
    assert list(scores.total) == [1.0, 0.0] and scores.faults == []
    assert "gsm8k {'index': 1} True" in scores.logs[1]["compute_score"]
    options = {"score": f"{tmp_path}/my_score.py:later"}
    with Runner(RunnerOptions(((VERL, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
        scores = runner.score(["?", "?"], ["4", "four"], columns)
    assert list(scores.total) == [1.0, 4.0]
    with pytest.raises(RewardError, match="no_such"):
        check(VERL, {"score": "no_such"})


OPENRLHF_REWARD = """
class Tensor:
    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def reward_func(queries, prompts, labels):
    right = [float(query == f"{prompt} {label}") for query, prompt, label
             in zip(queries, prompts, labels)]
    return {"rewards": Tensor(right), "scores": right, "extra_logs": {}}
"""


def test_a_function_of_openrlhf_gets_its_arguments(tmp_path):
    (tmp_path / "reward_func.py").write_text(OPENRLHF_REWARD)
    name = "rewards.foreign.openrlhf:reward_func"
    options = {"function": f"{tmp_path}/reward_func.py:reward_func", "label": "truth"}
    columns = {"truth": ["4", "5"], "other": [1, 2]}
    with Runner(RunnerOptions(((name, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
        scores = runner.score(["2 + 2?", "2 + 2?"], [" 4", " 4"], columns)
    assert list(scores.total) == [1.0, 0.0] and scores.faults == []
    with pytest.raises(RewardError, match="needs the option `function`"):
        check(name, {})


TUNIX_REWARD = """
def check_answer(prompts, completions, answer, **kwargs):
    assert all(isinstance(text, str) for text in [*prompts, *completions])
    return [3.0 if text == right else 0 for text, right in zip(completions, answer)]


def compute_score(solution_str, ground_truth):
    return solution_str == ground_truth
"""


def test_a_function_of_tunix_gets_texts(tmp_path):
    (tmp_path / "gsm8k.py").write_text(TUNIX_REWARD)
    name = "rewards.foreign.tunix:reward_fn"
    said = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    prompts = [[{"role": "user", "content": "2 + 2?"}]] * 2
    truths = [{"ground_truth": "4"}, {"ground_truth": "4"}]
    columns = {"answer": ["4", "4"], "reward_model": truths}
    for function, expected in (("check_answer", [3.0, 0.0]), ("compute_score", [1.0, 0.0])):
        options = {"function": f"{tmp_path}/gsm8k.py:{function}"}
        with Runner(RunnerOptions(((name, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
            scores = runner.score(prompts, said, columns)
        assert list(scores.total) == expected and scores.faults == []
