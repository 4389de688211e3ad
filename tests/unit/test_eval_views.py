"""The folder of `rl eval` as rl report, compare, samples and view read it; without a model."""

import json
import math
import re

import numpy as np
import pytest

from rewards import Scores
from rl.commands import cli
from rl.data.encoded import Example, Problem
from rl.errors import ConfigError
from rl.evaluation import paired
from rl.evaluation.folder import EvaluationFolder
from rl.evaluation.prepare import PreparedTask
from rl.evaluation.problems import key_of
from rl.evaluation.task import Task
from rollout import Completion, SamplingParams
from rollout.types import Group, Trajectory

SCORES = {"strict": "numeric_answer", "each": {"reward": "numeric_answer", "of_each": "parts"}}


def prepared(right, name="sums", first=0):
    """A task with a problem for each row of `right`: float[P, G, 2], its scores."""
    values = {"about": "Sums.", "source": "x", "prompt": "{{ q }}", "scores": SCORES}
    chosen = Task.model_validate(values | {"samples": len(right[0]), "k": [1], "by": ["kind"]})
    examples = [
        Example(
            f"{n}+1=",
            columns={
                "answer": str(n + 1),
                "kind": "even" if n % 2 == 0 else "odd",
                "parts": [1, 2],
            },
            where=f"x:{n}",
        )
        for n in range(first, first + len(right))
    ]
    problems = [Problem(example, [1, 2]) for example in examples]
    params = SamplingParams(n=len(right[0]), max_new_tokens=3)
    settings = {"seed": 0, "temperature": 0.0, "samples": len(right[0]), "rows": name}
    return PreparedTask(name, chosen, problems, [*map(key_of, examples)], params, settings)


def write(path, right, model="m", settings=None, **more):
    """Writes the folder of an evaluation with these scores."""
    task = prepared(right, **more)
    task.settings.update(settings or {})
    with EvaluationFolder(path, {"name": model, "checkpoint": None}, [task]) as folder:
        for number, rewards in enumerate(right):
            made = [Completion([5, 6], [-0.5, -0.1], "stop", f"<b>{number}") for _ in rewards]
            problem = task.problems[number]
            trajectories = [Trajectory.of_completion(problem.ids, each) for each in made]
            values = np.asarray(rewards, float)
            scores = Scores(values, values[:, 0], ("strict", "each"), [], {})
            folder.write(task, Group(problem, number, trajectories), scores)
        folder.finish(task)
    return path


def both(shares):
    return [[[float(each), float(each)] for each in row] for row in shares]


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2, (40, 2))
    after = np.maximum(before, rng.integers(0, 2, (40, 2)))
    return (
        write(tmp_path / "before", both(before), "m", {"temperature": 0.0}),
        write(tmp_path / "after", both(after), "other", {"temperature": 1.0}),
        after.mean(axis=1) - before.mean(axis=1),
    )


def rl(*arguments):
    return cli.main([*map(str, arguments)])


def text_of(page):
    shown = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))


def test_a_comparison_prints_the_paired_difference_with_its_interval(folders, capsys):
    before, after, differences = folders
    assert rl("compare", before, after, "--text") == 0
    shown = capsys.readouterr().out
    value = differences.mean()
    error = differences.std(ddof=1) / math.sqrt(40)
    low, high = value - 1.96 * error, value + 1.96 * error
    row = next(line.split() for line in shown.splitlines() if line.startswith("sums  strict"))
    assert [float(each) for each in (row[4], row[5], row[7])] == pytest.approx(
        [value, low, high], abs=2e-3
    )
    assert row[-1] == "40"
    assert "sums.temperature  0.0     1.0" in shown and '"other"' in shown
    page, numbers = after / "c.html", after / "c.json"
    assert rl("compare", before, after, "-o", page, "--json", numbers) == 0
    assert "sums strict" in re.sub(r" +", " ", capsys.readouterr().out)
    assert "Paired differences" in text_of(page)
    by = json.loads(numbers.read_text())["paired"][0]["by"]
    assert by["value"] == pytest.approx(value) and by["n"] == 40


def test_problems_are_paired_by_their_question(tmp_path):
    """The second evaluation has other problems before those that both have, and one unscored."""
    ones = both([[1], [0], [1], [1]])
    ones[2][0] = [math.nan, math.nan]
    before = write(tmp_path / "a", ones, first=2)
    after = write(tmp_path / "b", both([[0], [0], [1], [1], [1]]), first=0)
    strict, each = paired.differences(before, after)
    # 2, 3 and 4 are in both, and 4 has no score before
    assert (strict.by.n, strict.before.value, strict.after.value) == (2, 0.5, 1.0)
    assert each.by == strict.by


def test_equal_questions_are_paired_in_their_order(tmp_path):
    folders = []
    for name, shares in (("a", [[1], [0]]), ("b", [[0], [0]])):
        folder = write(tmp_path / name, both(shares))
        file = folder / "problems.jsonl"
        lines = [json.loads(line) | {"key": "same"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(folder)
    strict = paired.differences(*folders)[0]
    assert (strict.by.n, strict.by.value) == (2, -0.5)


def test_evaluations_without_a_common_problem_are_refused(tmp_path, folders, capsys):
    other = write(tmp_path / "other", both([[1]]), name="others")
    assert rl("compare", folders[0], other, "--text") == 3
    assert "no problem in common" in capsys.readouterr().err


def test_a_report_shows_the_scores_with_intervals(folders, capsys):
    before = folders[0]
    assert rl("report", before, "--json", before / "r.json") == 0
    shown = text_of(before / "report.html")
    task = json.loads((before / "eval.json").read_text())["tasks"]["sums"]
    accuracy = task["scores"]["strict"]["accuracy"]
    interval = f"{accuracy['low']:.3f} to {accuracy['high']:.3f}"
    assert f"sums strict {accuracy['value']:.3f} {interval} 40 2" in shown
    assert "sums strict by kind" in shown and "evaluation of m" in shown
    assert "&lt;b&gt;0" in (before / "report.html").read_text()
    numbers = json.loads((before / "r.json").read_text())
    assert numbers["evaluation"]["tasks"]["sums"] == task
    assert numbers["verdict"] == []


def test_samples_are_listed_filtered_and_shown(folders, tmp_path, capsys):
    before = folders[0]
    assert rl("samples", before, "reward.strict<0.5", "--limit", 100, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wrong = [line["columns"]["answer"] for line in lines]
    results = json.loads((before / "eval.json").read_text())["tasks"]["sums"]
    share = results["scores"]["strict"]["reward_mean"]
    assert len(wrong) == round(80 * (1 - share)) and all(line["eval"] for line in lines)
    assert rl("view", before, "--static", tmp_path / "site") == 0
    assert (tmp_path / "site" / "index.html").is_file()


def test_a_run_and_an_evaluation_are_told_apart(folders, tmp_path):
    before = folders[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match="the folder of a run"):
        write(tmp_path / "run", both([[1]]))
    with pytest.raises(ConfigError, match="model.name"):
        write(before, both([[1, 1]]), "another")
