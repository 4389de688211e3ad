"""Rewards are looked up by name, module, file and entry point, and wrong ones are refused before a
run."""

import importlib.metadata
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rewards
from rewards import RewardError, Runner, RunnerOptions, registry, reward
from rewards.registry import check, load

ROOT = Path(__file__).resolve().parents[2]


@reward
def registered_by_its_own_name(prompts, completions):
    return [3.0] * len(completions)


@reward("registered-elsewhere")
def _under_another_name(completions):
    return [4.0] * len(completions)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def scored(spec, **options):
    """What a worker process returns for one completion "a"."""
    with Runner(RunnerOptions(((spec, 1.0, options),), workers=1, timeout_s=30.0)) as runner:
        scores = runner.score(["p"], ["a"], {})
    assert scores.faults == []
    return scores.total[0]


def test_registered_names_resolve_here_and_in_workers():
    assert load("registered_by_its_own_name") is registered_by_its_own_name
    assert scored("registered_by_its_own_name") == 3.0
    assert scored("registered-elsewhere") == 4.0
    assert {"registered_by_its_own_name", "registered-elsewhere", "exact_answer"} <= set(
        rewards.known()
    )


def test_a_file_loads_with_its_neighbours(folder):
    (folder / "mine").mkdir()
    (folder / "mine/neighbour_of_mine.py").write_text("VALUE = 5.0\n")
    (folder / "mine/own.py").write_text(
        "from neighbour_of_mine import VALUE\nfrom rewards import reward\n"
        "def plain(completions):\n    return [VALUE]\n"
        "@reward('fancy-name')\ndef _fancy(completions, plus=1):\n    return [VALUE + plus]\n"
    )
    assert load("mine/own.py:plain")(completions=["a"]) == [5.0]
    assert load("mine/own.py:plain") is load(f"{folder}/mine/own.py:plain")
    assert scored("mine/own.py:plain") == 5.0
    assert scored("mine/own.py:fancy-name", plus=2) == 7.0
    assert scored("fancy-name") == 6.0  # known by its name, once the file is loaded


def test_a_file_that_two_threads_load_is_run_once_and_to_its_end(folder):
    (folder / "slow.py").write_text(
        "import time\ntime.sleep(0.3)\ndef plain(completions):\n    return [1.0]\n"
    )
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load, ["slow.py:plain"] * 2)
    assert first is second


def test_a_module_loads_from_the_current_folder(folder):
    (folder / "package_of_mine").mkdir()
    (folder / "package_of_mine/__init__.py").touch()
    (folder / "package_of_mine/scores.py").write_text(
        "from . import __name__ as n\ndef f(completions): return [6.0]\n"
    )
    assert load("package_of_mine.scores:f")(completions=["a"]) == [6.0]
    assert scored("package_of_mine.scores:f") == 6.0


def test_an_installed_entry_point_loads(folder, monkeypatch):
    (folder / "installed_rewards.py").write_text("def f(completions): return [8.0]\n")
    info = folder / "someone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[duet.rewards]\nof-someone = installed_rewards:f\n")
    monkeypatch.syspath_prepend(str(folder))
    assert [entry.name for entry in importlib.metadata.entry_points(group="duet.rewards")] == [
        "of-someone"
    ]
    assert "of-someone" in rewards.known()
    assert scored("of-someone") == 8.0


def test_a_class_with_a_call_is_a_reward(folder):
    (folder / "own.py").write_text(
        "class Scorer:\n    def __call__(self, completions, plus=0.0):\n        return [1.0 + "
        "plus]\nscorer = Scorer()\n"
    )
    assert scored("own.py:scorer", plus=0.5) == 1.5


def test_two_rewards_of_one_name_are_refused(folder):
    (folder / "own.py").write_text(
        "from rewards import reward\n@reward\ndef exact_answer(completions):\n    return [1.0]\n"
    )
    with pytest.raises(
        RewardError, match=r"'exact_answer' of .*own.py is taken by .*exact_answer.py"
    ):
        load("own.py:exact_answer")


def test_two_functions_of_one_file_cannot_share_a_name(folder):
    (folder / "own.py").write_text(
        "from rewards import reward\n"
        "@reward('shared-name')\ndef one(completions):\n    return [1.0]\n"
        "@reward('shared-name')\ndef two(completions):\n    return [2.0]\n"
    )
    with pytest.raises(RewardError, match="'shared-name' of .* is taken"):
        load("own.py:one")
    registry._registered.pop("shared-name")


FILE = """
from rewards import reward

def takes(completions, limit: int = 3, rate: float | None = None, tags: list[str] = ()):
    return [1.0]

def needs(prompts, completions, answer, topic=None):
    return [1.0]

def wrong_names(ps, cs):
    return [1.0]

def by_position(prompts, completions, /):
    return [1.0]

def _positive(limit=1):
    if limit < 1:
        raise ValueError("limit must be positive")

@reward(check=_positive)
def careful(completions, limit=1):
    return [1.0]

NUMBER = 3
"""


@pytest.mark.parametrize(
    "spec, options, words",
    [
        (
            "exact_anser",
            {},
            "unknown reward 'exact_anser' .nearest: exact_answer",
        ),
        ("", {}, "a reward is named by text"),
        (None, {}, "a reward is named by text"),
        ("own.py", {}, "say which function of the file: own.py:function"),
        ("missing.py:f", {}, "there is no file .*missing.py"),
        ("missing_module:f", {}, "No module named 'missing_module'"),
        ("own.py:take", {}, "no function 'take' there .nearest: takes;"),
        ("own.py:NUMBER", {}, "is a int, not a function"),
        (
            "broken.py:f",
            {},
            r"importing it failed: ZeroDivisionError: division by zero \(line 3 of .*broken.py\)",
        ),
        ("unfinished.py:f", {}, "importing it failed: SyntaxError"),
        ("leaving.py:f", {}, "importing it failed: SystemExit: 3"),
        ("own.py:wrong_names", {}, r"its signature is \(ps, cs\); arguments are passed by name"),
        ("own.py:by_position", {}, "arguments are passed by name"),
        ("own.py:takes", {"limt": 3}, "no option 'limt' .nearest: limit;"),
        ("own.py:takes", {"limit": "3"}, "option 'limit' is '3', expected int"),
        ("own.py:takes", {"limit": True}, "option 'limit' is True, expected int"),
        ("own.py:takes", {"rate": "high"}, r"option 'rate' is 'high', expected float \| None"),
        ("own.py:takes", {"completions": []}, "'completions' is given by the run"),
        ("own.py:careful", {"limit": 0}, "reward own.py:careful: limit must be positive"),
        ("own.py:needs", {}, r"it needs 'answer', .*columns: question"),
    ],
)
def test_wrong_rewards_are_refused_with_the_reason(folder, spec, options, words):
    (folder / "own.py").write_text(FILE)
    (folder / "broken.py").write_text("\ndef f(): ...\n1 / 0\n")
    (folder / "unfinished.py").write_text("def f(:\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=words):
        check(spec, options, columns=["question"])
    registry._registered.pop("careful", None)


def test_a_column_with_the_name_of_an_argument_of_the_run_is_refused_where_it_would_be_passed(
    folder,
):
    (folder / "own.py").write_text(
        "def cut(completions, truncated): ...\ndef short(completions): ...\ndef "
        "every(completions, **columns): ...\n"
    )
    for spec in ("own.py:cut", "own.py:every"):
        with pytest.raises(
            RewardError, match="has a column 'truncated', .* given by the run; rename the column"
        ):
            check(spec, columns=["truncated"])
        check(spec, columns=["answer"])
    check("own.py:short", columns=["truncated"])


def test_right_options_and_columns_are_accepted(folder):
    (folder / "own.py").write_text(FILE)
    check("own.py:takes", {"limit": 4, "rate": 1, "tags": ["a"]})
    check("own.py:takes", {"rate": None}, columns=[])
    check("own.py:needs")
    check("own.py:needs", columns=["answer"])
    check("own.py:needs", {"answer": "4"}, columns=[])
    check("soft_overlong", {}, columns=[])
    registry._registered.pop("careful", None)


def test_importing_rewards_is_light():
    """Workers and the command line import it: no numpy in workers, nothing heavy anywhere."""
    code = (
        "import sys, rewards, rewards.registry, rewards.workers.worker\n"
        "assert 'numpy' not in sys.modules\n"
        "import rewards.check, rewards.runner\n"
        "from rewards import *\n"
        "print(sorted({'jax', 'torch', 'transformers', 'datasets', 'pydantic', 'sympy', 'rich'} & "
        "set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stderr
