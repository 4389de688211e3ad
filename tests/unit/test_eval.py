"""`rl eval` on a small model with the bytes' tokenizer."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl.commands import cli
from rl.evaluation import measure, task
from rl.records import samples

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "level": a % 2} for a in range(5)]


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "own.py"
    file.write_text(
        "import re\nfrom rewards import reward\n\n\n"
        "def _answer(completion):\n    return completion[:1] or None\n\n\n"
        "@reward('even', answer=_answer)\n"
        "def even(prompts, completions, answer):\n"
        "    return [None if right == '5' else float(ord(text[:1] or 'a') % 2 == 0)\n"
        "            for text, right in zip(completions, answer)]\n"
    )
    return f"{file}:even"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def evaluate(small_model, reward):
    def evaluate(data, out, *arguments):
        return rl(
            *("eval", small_model, "--data", data, "--reward", reward, "--max-new-tokens", 4),
            *("--slots", 5, "-o", out, *arguments),
        )

    return evaluate


@pytest.fixture(scope="module")
def measured(evaluate, data, tmp_path_factory):
    """The folder of an evaluation that has ended."""
    out = tmp_path_factory.mktemp("measured") / "out"
    assert evaluate(data, out) == 0
    return out


@pytest.fixture(scope="module")
def sampled(evaluate, data, tmp_path_factory):
    """The folder of an evaluation with four samples of each problem, and what it printed."""
    out, shown = tmp_path_factory.mktemp("sampled") / "out", io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert evaluate(data, out, "--samples", 4, "--k", "1,2", "--maj", 3, "--json") == 0
    return out, json.loads(shown.getvalue())


def rl(*arguments):
    return cli.main([*map(str, arguments), "--platform", "cpu"])


def test_the_numbers_are_those_of_the_samples(sampled):
    out, shown = sampled
    assert shown == json.loads((out / "eval.json").read_text())
    task = shown["tasks"]["test"]
    assert (task["problems"], task["samples"]) == (5, 4)
    records = list(samples.read(out))
    assert len(records) == 20 and all(record["eval"] for record in records)
    right = {}
    for record in records:
        expected = float(ord(record["completion"][:1] or "a") % 2 == 0)
        if ROWS[record["prompt_id"]]["answer"] == "5":
            assert record["rewards"] == {"even": None}
        else:
            assert record["rewards"] == {"even": expected}
            right.setdefault(record["prompt_id"], []).append(expected)
    score = task["scores"]["even"]
    assert score["unscored"] == 4 and score["accuracy"]["n"] == 4
    shares = [sum(each) / 4 for each in right.values()]
    assert score["accuracy"]["value"] == pytest.approx(sum(shares) / 4)
    assert score["pass"]["1"]["value"] == pytest.approx(sum(shares) / 4)
    lines = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    known = [line["right"]["even"] for line in lines if line["right"]["even"] is not None]
    assert known == pytest.approx([shares[i] for i in sorted(range(4), key=[*right].__getitem__)])
    assert json.loads((out / "run.json").read_text())["attempts"][0]["exit_code"] == 0


def test_an_interruption_keeps_what_is_scored_and_the_same_command_continues(
    evaluate, data, measured, tmp_path, capsys, monkeypatch
):
    cut = tmp_path / "cut"
    groups = measure._groups

    def interrupted(*arguments):
        for number, group in enumerate(groups(*arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield group

    monkeypatch.setattr(measure, "_groups", interrupted)
    assert evaluate(data, cut) == 130
    assert "continues" in capsys.readouterr().err
    kept = list(samples.read(cut))
    assert len(kept) == 3
    with (cut / "samples.jsonl").open("a") as file:  # a kill within a write
        file.write('{"stage": "test", "st')
    asked = []

    def counted(generator, task, numbers, processors):
        asked.extend(numbers)
        return groups(generator, task, numbers, processors)

    monkeypatch.setattr(measure, "_groups", counted)
    assert evaluate(data, cut) == 0
    assert asked == [n for n in range(5) if n not in {each["prompt_id"] for each in kept}]
    texts = [
        {(each["prompt_id"], each["completion"], each["reward"]) for each in samples.read(folder)}
        for folder in (measured, cut)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 5
    results = [
        json.loads((folder / "eval.json").read_text())["tasks"] for folder in (measured, cut)
    ]
    assert results[0] == results[1]
    monkeypatch.setattr(measure, "_groups", None)  # nothing is left to sample
    assert evaluate(data, cut) == 0
    assert "5 problems are measured already" in capsys.readouterr().err


def test_another_evaluation_in_the_same_folder_is_refused(
    evaluate, data, measured, tmp_path, capsys
):
    before = (measured / "samples.jsonl").read_bytes()
    assert evaluate(data, measured, "--seed", 1) == 2
    error = capsys.readouterr().err
    assert "test.seed: 0 there, 1 now" in error and "-o" in error
    rows = data.read_text()
    data.write_text(rows.replace("1+1", "7+1"))
    assert evaluate(data, measured) == 2
    data.write_text(rows)
    assert (measured / "samples.jsonl").read_bytes() == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    assert evaluate(data, tmp_path / "run") == 2
    assert "the folder of a run" in capsys.readouterr().err


def test_a_damaged_line_of_problems_is_refused_and_mended_by_the_same_command(
    evaluate, data, measured, tmp_path, capsys
):
    out = tmp_path / "out"
    shutil.copytree(measured, out)
    file = out / "problems.jsonl"
    before = file.read_text()
    file.write_text(before[:-9])
    assert evaluate(data, out) == 3
    assert "problems.jsonl:5: damaged; remove the file" in capsys.readouterr().err
    file.unlink()
    assert evaluate(data, out) == 0
    assert file.read_text() == before


def test_shots_are_the_first_rows_and_are_not_measured(evaluate, data, tmp_path):
    out = tmp_path / "out"
    assert evaluate(data, out, "--few-shot", 2, "--limit", 1) == 0
    (record,) = samples.read(out)
    assert record["prompt"] == "0+1= 1\n\n1+1= 2\n\n2+1="
    assert evaluate(data, tmp_path / "none", "--few-shot", 5) == 3


def test_prompts_and_draws_are_those_of_rl_generate(small_model, data, sampled, capsys):
    same = ("--samples", 4, "--max-new-tokens", 4, "--temperature", 1, "--seed", 0)
    assert rl("generate", small_model, "--prompts", data, *same) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = {(line["prompt"], line["sample"]): line["tokens"] for line in lines}
    result = {(each["prompt"], each["sample"]): each["tokens"] for each in samples.read(sampled[0])}
    assert result == expected and len(result) == 20


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "--task gsm8k"),
        (("--data", "{data}"), 2, "--reward numeric_answer"),
        (("--data", "{data}", "--reward", "numeric_anser"), 2, "nearest: numeric_answer"),
        (("--data", "{data}", "--reward", "math", "--k", "4", "--samples", "2"), 2, "--samples 4"),
        (("--data", "{data}", "--reward", "length", "--maj", "1"), 2, "reward length"),
        (("--data", "{data}", "--reward", "math", "--columns", "prompt"), 2, "NAME=COLUMN"),
        (
            ("--data", "{data}", "--reward", "math", "--columns", "answer=right"),
            3,
            "no column 'right'",
        ),
        (("--task", "math500", "--correct-at", "0.5"), 2, "--correct-at: the file of a task"),
        (("--task", "math500", "--data", "{data}", "--few-shot", "2"), 2, "no rows for shots"),
        (("--data", "nowhere.jsonl", "--reward", "math"), 2, "no such file"),
        (("--data", "{data}", "--reward", "math", "--system", "Be brief."), 2, "add --chat"),
        (
            ("--data", "{data}", "--reward", "math", "--temperature", "0", "--samples", "2"),
            2,
            "--temperature 1",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_type(
    small_model, data, tmp_path, capsys, monkeypatch, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    arguments = [each.format(data=data) for each in arguments]
    assert rl("eval", small_model, *arguments) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "evals").exists()


def test_a_missing_model_has_a_code_of_its_own(data, tmp_path, capsys):
    assert rl("eval", tmp_path / "nowhere", "--data", data, "--reward", "math") == 4
    assert "no config.json" in capsys.readouterr().err


def test_the_verb_imports_no_jax():
    code = "import sys, rl.commands.models.eval, rl.evaluation.task; print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_tasks_are_measured_on_rows_in_folders(small_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("math500", "ifeval")
    for name in names:  # a folder with the name of the source goes before the hub
        source = tmp_path / task.read(name).source
        source.parent.mkdir()
        shutil.copytree(Path(__file__).parents[1] / "fixtures" / "tasks" / name, source)
    options = ("--max-new-tokens", 4, "--slots", 5, "--limit", 3, "-o", tmp_path / "out")
    assert rl("eval", small_model, "--task", ",".join(names), *options) == 0
    shown = capsys.readouterr().out
    assert "ifeval   prompt_strict" in shown and "math500 boxed by subject" in shown
    tasks = json.loads((tmp_path / "out" / "eval.json").read_text())["tasks"]
    scores = tasks["ifeval"]["scores"]
    assert [*scores] == [
        "prompt_strict",
        "instruction_strict",
        "prompt_loose",
        "instruction_loose",
    ]
    lines = map(json.loads, (tmp_path / "out" / "problems.jsonl").read_text().splitlines())
    lines = [line for line in lines if line["task"] == "ifeval"]
    weights = [line["counts"]["instruction_strict"] for line in lines]
    assert weights == [2, 2, 1]  # instructions of each prompt
    right = [line["right"]["instruction_strict"] for line in lines]
    assert right[0] == 0.5
    mean = sum(a * b for a, b in zip(weights, right, strict=True)) / sum(weights)
    assert scores["instruction_strict"]["accuracy"]["value"] == pytest.approx(mean)
    assert 0 < mean < 1  # four tokens have no comma, and no five words
