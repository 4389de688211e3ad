"""Every task of rl/tasks/, listed from the folder, and several options of each."""

import dataclasses
import importlib

import pytest

from rl import tasks
from rl.tasks import arithmetic

OPTIONS = {
    "arithmetic": [
        {},
        {"operations": ["+", "-"], "terms": 3, "max_operand": 12, "style": "scratchpad"},
        {"operations": ["*"], "max_operand": 30, "style": "scratchpad"},
        {
            "operations": ["+", "-", "*"],
            "min_terms": 2,
            "terms": 5,
            "max_operand": 40,
            "style": "steps",
            "problems": 2000,
        },
        {
            "operations": ["+", "-", "*"],
            "terms": 4,
            "problems": 3000,
            "style": "reversed",
            "end": ".",
        },
        {"style": "reversed", "noise": 0.3},
        {"max_operand": 999_999, "terms": 8, "problems": 2000, "prompt": "What is {problem}?"},
    ]
}
CASES = [(name, options) for name in tasks.names() for options in OPTIONS.get(name, [{}])]


def _shown(problem):
    """(the prompt with the bytes of its picture or sound, the demonstration) of a problem."""
    contents = [problem.columns.get("image"), problem.columns.get("audio", {}).get("array")]
    return problem.prompt + "".join(
        each.tobytes().hex() for each in contents if each is not None
    ), problem.completion


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_splits_are_fixed_and_share_no_problem(name, options):
    train, held_out = (tasks.problems(name, options, split) for split in ("train", "eval"))
    assert train and held_out
    shown = [[_shown(problem) for problem in split] for split in (train, held_out)]
    assert [
        [_shown(problem) for problem in tasks.problems(name, options, split)]
        for split in ("train", "eval")
    ] == shown
    prompts = [{prompt for prompt, _ in split} for split in shown]
    assert not prompts[0] & prompts[1]
    assert [len(split) for split in prompts] == [len(train), len(held_out)]
    seen = {prompt + completion for prompt, completion in shown[0] if completion is not None}
    assert not any(prompt + str(completion) in seen for prompt, completion in shown[1])
    assert all(problem.columns["answer"] for problem in (*train, *held_out))


@pytest.mark.parametrize("name", tasks.names())
def test_unknown_options_and_splits_are_refused_and_all_options_are_described(name):
    kind = importlib.import_module(f"rl.tasks.{name}").Options
    first = dataclasses.fields(kind)[0].name
    with pytest.raises(ValueError, match=rf"no option `{first}x` \(nearest: {first}"):
        tasks.check(name, {first + "x": 1})
    with pytest.raises(ValueError, match="splits train and eval"):
        tasks.problems(name, {}, "test")


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="no task arithmetics"):
        tasks.check("arithmetics", {})


def test_arithmetic_prompts_can_have_spaces():
    options = arithmetic.Options(
        operations=["-", "*"], terms=3, max_operand=2, prompt="{problem}?", spaces=True
    )
    problem = arithmetic.problems(options, "train")[0]
    assert problem.prompt.count(" ") == 4
    assert problem.prompt.replace(" ", "") == problem.columns["problem"] + "?"


def test_arithmetic_demonstrations_are_right():
    for _, options in CASES:
        style = options.get("style", "plain")
        for problem in tasks.problems("arithmetic", options, "eval")[:200]:
            text, end = problem.columns["problem"], options.get("end", "")
            # The expressions hold digits and + - * only, as python writes them; no other oracle is
            # as plain.
            assert set(text) <= set("0123456789+-*")
            right = str(arithmetic_oracle(text))
            written = problem.completion.removesuffix(end)
            assert problem.columns["answer"] == (right[::-1] if style == "reversed" else right)
            if style in ("scratchpad", "steps"):
                assert {arithmetic_oracle(part) for part in written.split("=")} == {int(right)}
            else:
                assert written == problem.columns["answer"]


def arithmetic_oracle(text: str) -> int:
    """Value of an expression by python's own parser, without running it."""
    import ast
    import operator

    functions = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.USub: operator.neg,
    }

    def value(node):
        if isinstance(node, ast.BinOp):
            return functions[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return functions[type(node.op)](value(node.operand))
        return int(node.value)

    return value(ast.parse(text, mode="eval").body)


def test_a_problem_and_its_rearrangements_are_held_out_together():
    identity = arithmetic.identity
    assert identity("12+34") == identity("34+12") != identity("12-34") != identity("34-12")
    assert identity("3*4+5") == identity("5+4*3") != identity("3*5+4")
    train = {p.columns["problem"] for p in tasks.problems("arithmetic", {}, "train")}
    held_out = {p.columns["problem"] for p in tasks.problems("arithmetic", {}, "eval")}
    assert len(held_out) >= 512
    assert all("+".join(reversed(problem.split("+"))) not in train for problem in held_out)


def test_all_problems_are_counted_and_reached():
    options = arithmetic.Options(operations=["+", "*"], terms=3, min_operand=2, max_operand=4)
    expressions = {
        arithmetic.expression(number, options) for number in range(arithmetic.count(options))
    }
    assert len(expressions) == arithmetic.count(options) == 4 * 27
    result = tasks.problems("arithmetic", dataclasses.asdict(options), "train")
    result += tasks.problems("arithmetic", dataclasses.asdict(options), "eval")
    assert {problem.columns["problem"] for problem in result} == expressions


def test_problems_of_several_lengths_come_in_the_parts_that_decay_says():
    options = {"min_terms": 2, "terms": 4, "max_operand": 30, "problems": 2400}
    result = [
        p for split in ("train", "eval") for p in tasks.problems("arithmetic", options, split)
    ]
    lengths = [problem.columns["problem"].count("+") + 1 for problem in result]
    assert {n: lengths.count(n) for n in set(lengths)} == {2: 800, 3: 800, 4: 800}
    assert len({problem.prompt for problem in result}) == 2400
    result = [
        p
        for split in ("train", "eval")
        for p in tasks.problems("arithmetic", options | {"decay": 0.5, "problems": 1400}, split)
    ]
    lengths = [problem.columns["problem"].count("+") + 1 for problem in result]
    assert {n: lengths.count(n) for n in set(lengths)} == {2: 800, 3: 400, 4: 200}
    for wrong in (0, 1.5, "half"):
        with pytest.raises(ValueError, match="`decay` must lie above 0 and at most at 1"):
            tasks.check("arithmetic", options | {"decay": wrong})
    for wrong in (1, 5, 2.0, True):
        with pytest.raises(ValueError, match="`min_terms` must be an integer from 2 to `terms`"):
            tasks.check("arithmetic", options | {"min_terms": wrong})


def test_scratchpads_are_written_as_documented():
    write = arithmetic.demonstration
    assert write("57+68", "scratchpad") == "15+110=125"
    assert write("57-68", "scratchpad") == "-1-10=-11"
    assert write("12*34", "scratchpad") == "48+360=408"
    assert write("2*30+4", "scratchpad") == "60+4=4+60=64"
    assert write("2+3", "scratchpad") == "5"
    assert write("57+68", "reversed") == "521"
    assert write("57+68", "steps") == "125"
    assert write("2+3*4+5", "steps") == "2+12+5=14+5=19"
    assert write("2-3*4*5+9", "steps") == "2-12*5+9=2-60+9=-58+9=-49"


def test_reasoning_gym_tasks_are_split_by_the_problem():
    pytest.importorskip("reasoning_gym")
    options = {
        "size": 60,
        "eval_size": 20,
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
    }
    train, held_out = (tasks.problems("chain_sum", options, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (60, 20)
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    with pytest.raises(ValueError, match=r"no option `sizee` \(nearest: size"):
        tasks.check("chain_sum", {"sizee": 1})
    with pytest.raises(ValueError, match="nearest: chain_sum"):
        tasks.check("chain_summ", {})


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'duet-rl\[tasks\]'"):
        tasks.check("chain_sum", {})


def test_a_task_of_ones_own_is_a_function_of_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def double(split, most=3):\n"
        "    return [{'prompt': f'{n}+{n}=', 'completion': str(2 * n), 'split': split} for n in "
        "range(most)]\n"
        "def broken(split):\n    return ['no mapping']\n"
    )
    (first, *_, last) = tasks.problems(f"{file}:double", {"most": 2}, "eval")
    assert (first.prompt, last.completion, last.columns) == ("0+0=", "2", {"split": "eval"})
    tasks.check(f"{file}:double", {"most": 2})
    with pytest.raises(ValueError, match="no option `least`"):
        tasks.check(f"{file}:double", {"least": 2})
    with pytest.raises(ValueError, match="task .*no function 'triple'"):
        tasks.check(f"{file}:triple", {})
    with pytest.raises(ValueError, match="must be a mapping"):
        tasks.problems(f"{file}:broken", {}, "train")
