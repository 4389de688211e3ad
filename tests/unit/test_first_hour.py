"""A newcomer's mistakes with the files of docs/start.md: each has its exit code, and says what,
where, what to type."""

import json
import re
from pathlib import Path

import pytest

from rl.commands import cli

START = (Path(__file__).resolve().parents[2] / "docs" / "start.md").read_text()
FILES = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the files that docs/start.md shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, text in FILES.findall(START):
        Path(name).write_text(text)
    return tmp_path


def check(capsys, *arguments: str) -> tuple[int, str, str]:
    """Returns the exit code of `rl-train --check my_run.yml ...`, its output and its errors."""
    code = cli.train_main(["--check", "my_run.yml", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_page_as_it_stands_passes(folder, capsys):
    code, shown, errors = check(capsys)
    assert code == 0 and not errors and "the configuration is good" in shown


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "grpo: data.jsonl: the dataset has no rows"),
        (b'{"prompt": "caf\xe9", "answer": "1"}\n', "data.jsonl:1: not UTF-8 (byte 0xe9 at place "
                                                    "15); save the file as UTF-8"),
        (b'{"prompt": "a", "answer": "1"}\n{"prompt": 1+1}\n', "data.jsonl:2: not valid JSON"),
        (b'{"question": "a", "answer": "1"}\n', "(columns: `question`, `answer`); set "
                                                "data.columns.prompt=question"),
        (b'{"prompt": "a", "right": "1"}\n', "needs 'answer', which is neither a column of the "
                                             "data (columns: right)"),
        (b'{"prompt": 7, "answer": "1"}\n', "data.jsonl:1: `prompt` must be a text or a list of "
                                            "messages, got int"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used(folder, capsys, content, expected):
    Path("data.jsonl").write_bytes(content)
    code, shown, errors = check(capsys, "data=data.jsonl")
    assert code == 3 and expected in errors and errors.startswith("error in the data: ")
    assert "refuse" not in errors and not shown, "the error comes alone, without the configuration"


@pytest.mark.parametrize("mark", [";", "|"])
def test_a_csv_file_with_another_separator(folder, capsys, mark):
    Path("data.csv").write_text(f"prompt{mark}answer\nhi{mark}2\n")
    code, _, errors = check(capsys, "data=data.csv")
    assert (
        code == 3
        and f"has '{mark}' in its name; separate the columns of a CSV file with commas" in errors
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "model model: model/config.json:1: not valid JSON"),
        (json.dumps({"architectures": ["BertModel"], "model_type": "bert"}), "BertModel"),
    ],
)
def test_a_model_directory_that_cannot_be_used_is_said_by_the_check(
    folder, capsys, config, expected
):
    Path("model").mkdir()
    Path("model/config.json").write_text(config)
    Path("my_run.yml").write_text(
        re.sub(r"^  overrides:.*\n", "", Path("my_run.yml").read_text(), flags=re.M)
    )
    code, shown, errors = check(capsys, "model.source=model")
    assert code == 4 and expected in errors and not shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["stages.0.steps"],
            "stages.0.steps: no such file; an override has a value: stages.0.steps=VALUE",
        ),
        (["runs/absent"], "runs/absent: no such file, and no directory of a run (nearest: "),
        (["latin.yml"], "latin.yml: not UTF-8 (byte 5); save the file as UTF-8"),
        (
            ["folder"],
            "folder: a directory without config.yml, so no run to continue; name a YAML file",
        ),
        (["stages.0.lr=1e-3"], "Duet calls it `stages.0.optimizer.learning_rate`"),
        (["run.dir=my_data.jsonl"], "run.dir: my_data.jsonl exists and is not a directory"),
        (
            ["rewards.functions=[broken.py:f]"],
            "importing it failed: SyntaxError: expected ':' (line 2 of ",
        ),
        (["data=absent.jsonl"], "data.path: no such file or directory: absent.jsonl (from "),
        (["model=qwen3-06b"], "no model of that name in configs/models/ (nearest: qwen3-0.6b"),
    ],
)
def test_a_command_that_is_wrong(folder, capsys, arguments, expected):
    Path("latin.yml").write_bytes(b"# caf\xe9\n")
    Path("folder").mkdir()
    Path("broken.py").write_text("\ndef f(completions)\n    return 1\n")
    code, shown, errors = check(capsys, *arguments)
    assert code == 2 and expected in errors and not shown


def test_a_reward_without_examples_names_its_columns(folder, capsys):
    Path("mine.py").write_text("def f(completions, answer, unit):\n    raise ValueError\n")
    assert cli.main(["reward", "test", "mine.py:f"]) == 2
    shown = capsys.readouterr().out
    assert (
        "not called: it needs the columns answer, unit" in shown
        and '"answer": ..., "unit": ...' in shown
    )


def test_prompts_that_cannot_be_read(folder, capsys):
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    for name, expected in (
        ("absent.txt", "No such file"),
        ("latin.txt", "not UTF-8 (byte 3); save the file as UTF-8"),
    ):
        from rl.data.prompts import read_prompts
        from rl.errors import DataError

        with pytest.raises(DataError, match=re.escape(f"--prompts {name}: {expected}")):
            read_prompts(name)
